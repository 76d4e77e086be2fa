"""The live line of 'hetnode join': what it says, and that it leaves nothing behind."""

from __future__ import annotations

import asyncio
import io
import logging

from rich.console import Console
from rich.logging import RichHandler

from node.monitoring.report import NodeReport, Rates
from node.views.live_line import LiveLine, node_line

TRAINING = NodeReport(
    activity="training",
    waits=("group", "payloads"),
    round_number=46,
    inner_step=1,
    rounds_total=3000,
    steps_per_round=2,
    tokens_per_step=640,
    train_loss=1.85,
)


def test_the_line_says_what_the_node_does() -> None:
    line = node_line(TRAINING, Rates(150_000.0, 20_000.0, 1.5)).plain
    assert line == (
        "training round 46/3000 █████░░░░░ 1/2 · waits for group, payloads · loss 1.8500 · 960 tokens/s"
        " · up 1.2 Mb/s, down 0.2 Mb/s"
    )
    assert node_line(NodeReport(activity="starting"), Rates()).plain == "starting"
    assert (
        node_line(TRAINING, Rates(), "someone uses\x1b[31m [b]it").plain == "rests: someone uses [31m [b]it"
    )
    away = NodeReport(activity="following", round_number=2, away=90.0)
    assert "following round 2  · coordinator away 1:30 min" in node_line(away, Rates()).plain


async def test_logs_scroll_past_above_the_line_and_it_vanishes_at_the_end() -> None:
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=60, _environ={})
    log = logging.Logger("a test")
    log.addHandler(RichHandler(console=console, show_path=False))
    looked = asyncio.Event()

    def look() -> tuple[NodeReport, str]:
        looked.set()
        return TRAINING, ""

    async with LiveLine(console, look, interval=0.001):
        await looked.wait()
        log.info("something has happened")
        looked.clear()
        await looked.wait()
    text = written.getvalue()
    assert "training" in text
    assert text.index("something has happened") < text.rindex("training")
    assert all(len(line) < 400 for line in text.splitlines())
    assert text.rstrip("\n").endswith("\x1b[2K")  # the line was erased
    assert "\x1b[?25h" in text  # the cursor is shown
