"""One live line below the log of ``hetnode join`` on a terminal."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from node.monitoring.report import NodeReport, RateMeter, Rates
from node.views.text import bar, count, duration, megabits, plain

_REFRESH_SECONDS = 1.0
_BAR = 10


def node_line(report: NodeReport, rates: Rates, reason: str = "") -> Text:
    """What a node does, the most important first: a narrow terminal cuts the end. `reason`: why it rests."""
    line = Text(no_wrap=True, overflow="ellipsis")
    if reason:
        return line.append(f"rests: {plain(reason, 200)}", "yellow")
    if report.place:
        return line.append(f"waits: {plain(report.place, 200)}", "yellow")
    line.append(report.activity, "green" if report.activity == "training" else "yellow")
    if report.round_number:
        line.append(f" round {report.round_number}")
        line.append(f"/{report.rounds_total} " if report.rounds_total else " ")
        if report.steps_per_round:
            line.append_text(bar(report.inner_step / report.steps_per_round, _BAR))
            line.append(f" {report.inner_step}/{report.steps_per_round}")
    parts = []
    if report.away:
        parts.append(f"coordinator away {duration(report.away)}")
    if report.waits:
        parts.append(f"waits for {', '.join(report.waits)}")
    if report.train_loss is not None:
        parts.append(f"loss {report.train_loss:.4f}")
    if report.tokens_per_step and rates.steps:
        parts.append(f"{count(rates.steps * report.tokens_per_step)} tokens/s")
    if report.round_number:
        parts.append(f"up {megabits(rates.sent)}, down {megabits(rates.received)}")
    return line.append("".join(f" · {part}" for part in parts))


class LiveLine:
    """Shows a line at the bottom of `console` inside its ``async with`` block, and takes it away at the end.

    What is logged to the same console scrolls past above it.

    Args:
        look: what the node does, and why it has to rest, or "".
    """

    def __init__(
        self,
        console: Console,
        look: Callable[[], tuple[NodeReport, str]],
        interval: float = _REFRESH_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console, self._look, self._interval, self._clock = console, look, interval, clock
        self._meter = RateMeter()
        # Refreshed by a task: a thread would be in the way of processes that fork.
        self._live = Live(Text(), console=console, auto_refresh=False, transient=True)
        self._task: asyncio.Task[None] | None = None
        self._is_paused = False

    async def __aenter__(self) -> Self:
        self._live.start()
        self._console.show_cursor(True)  # a process that is killed could not bring it back
        self._task = asyncio.create_task(self._keep_showing())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        self._live.stop()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The line is away inside the block, in which a person may type."""
        self._live.stop()
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False
            self._live.start()
            self._console.show_cursor(True)

    async def _keep_showing(self) -> None:
        while True:
            if not self._is_paused:
                report, reason = self._look()
                line = node_line(report, self._meter.note(self._clock(), report), reason)
                self._live.update(line, refresh=True)
            await asyncio.sleep(self._interval)
