"""The live view: what is on the screen, and what the keys do."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from rich.console import Console
from rich.text import Text
from textual.pilot import Pilot
from textual.widgets import Static, TabbedContent

from node.monitoring.report import NodeReport
from node.views.watch import swarm_view
from node.watch.app import VIEWS, WatchApp
from protocol.errors import ErrorCode, HetnodeError
from protocol.status import Cause, CauseCode, Measurement, RunPhase, RunStatus
from protocol.types import Dialer, Lifecycle, Link, Member, Plan, Replica, StageRange
from tests.builders import keyed, status_of
from tests.support.watching import AWAY, ScriptedNode, ScriptedRun

A, B, C = (keyed(i).peer for i in range(3))
HOSTILE = "[bold]x[/bold] [/] \x1b[31m\x1b]0;t\x07 \x9b2J\u202e " + "y" * 100_000


def running(**changes: object) -> RunStatus:
    """A full replica, a pipeline of two, and a spare."""
    plan = Plan(
        *(1, 1, 0),
        (
            Replica(0, (Member(A, StageRange(0, 2), ""),), ()),
            Replica(
                1,
                (Member(B, StageRange(0, 1), ""), Member(C, StageRange(1, 2), "")),
                (Link(8, Dialer.UPSTREAM),),
            ),
        ),
        "the first plan",
    )
    measurement = Measurement(A, 1, 0, 0, 2.0, 1.75, 640, 10.0, 2.0, complete=True, compute_seconds=5.0)
    status = status_of(rounds=10, measurements=[measurement])
    (one,) = status.peers
    peers = tuple(replace(one, peer=peer, problem="", role_reason="") for peer in (A, B, C))
    spare = replace(peers[0], peer=keyed(3).peer, lifecycle=Lifecycle.SYNCING, cause=Cause(CauseCode.SPARE))
    found = replace(
        status,
        plan=plan,
        peers=(*peers, spare),
        round_number=2,
        round_seconds=30.0,
        expected_round_seconds=45.0,
        remaining_seconds=7200.0,
        tokens_committed=123_456,
    )
    return replace(found, **changes)  # type: ignore[arg-type]


@asynccontextmanager
async def shown(
    run: ScriptedRun | None, node: ScriptedNode | None = None, size: tuple[int, int] = (80, 24)
) -> AsyncIterator[tuple[WatchApp, Pilot[None]]]:
    app = WatchApp(run, node, interval=1000)
    async with app.run_test(size=size, notifications=True) as pilot:
        await asked(pilot)
        yield app, pilot


async def asked(pilot: Pilot[None]) -> None:
    """Have the app ask the run and the node again, and wait until what they tell is on the screen."""
    await pilot.pause()
    assert isinstance(pilot.app, WatchApp)
    await pilot.app.look_again()
    await pilot.pause()


def screen_of(app: WatchApp) -> str:
    """The characters on the screen, line by line."""
    lines = app.screen._compositor.render_strips()
    return "\n".join(strip.text for strip in lines)


async def test_the_run_is_shown_on_a_small_terminal() -> None:
    async with shown(ScriptedRun(running(), known={0: [(0, 5.0), (1, 3.0)]})) as (app, _):
        text = screen_of(app)
    for part in (
        "training: round 2 of 3",
        "1 of 10 rounds, end in 2 h 0 min",
        "round 2: 30 s, ends in about 15 s",
        "members done, slowest 1/2",
        "3 stage rounds committed, 1 aborted",
        "123.5k tokens",
        "1.7500",
        "█▁",
        "live",
        "q Quit",
    ):
        assert part in text, part
    assert all(len(line) <= 80 for line in text.splitlines())


async def test_the_swarm_is_shown_as_chains() -> None:
    node = ScriptedNode(NodeReport(peer=C))
    async with shown(ScriptedRun(running()), node) as (app, pilot):
        await pilot.press("2")
        await asked(pilot)
        text = screen_of(app)
    lines = [line.strip() for line in text.splitlines()]
    assert any(line.startswith("replica-0 full  round 1, loss 1.7500") for line in lines)
    assert any(line.startswith(f"{A[-8:]} stages 0-1 training 2:1/2 busy 50%") for line in lines)
    assert any(line.startswith(f"└▶ {C[-8:]} stage 1 k 8 training") for line in lines)
    assert "not in the plan" in text
    assert "waiting as a spare" in text


async def test_the_help_is_whole_on_a_small_terminal() -> None:
    async with shown(ScriptedRun(running())) as (app, pilot):
        await pilot.press("question_mark")
        await pilot.pause()
        words = " ".join(line[5:-5].strip(" │") for line in screen_of(app).splitlines())
    for part in (
        "it finishes its round",
        "p again lets it take part again",
        "that of the coordinator",
        "peers.",
    ):
        assert part in " ".join(words.split()), part


def test_an_uncompressed_link_is_shown_as_such() -> None:
    status = running()
    assert status.plan is not None
    replicas = tuple(
        replace(replica, links=tuple(replace(link, k=0) for link in replica.links))
        for replica in status.plan.replicas
    )
    console = Console(width=80)
    with console.capture() as captured:
        console.print(swarm_view(replace(status, plan=replace(status.plan, replicas=replicas))))
    assert f"└▶ {C[-8:]} stage 1 uncompressed training" in captured.get()


async def test_tab_and_arrows_turn_the_views() -> None:
    async with shown(ScriptedRun(running()), ScriptedNode()) as (app, pilot):
        seen = []
        for key in ("tab", "right", "tab", "tab", "left", "shift+tab", "1", "l"):
            await pilot.press(key)
            seen.append(app.query_one(TabbedContent).active)
    assert seen == ["swarm", "node", "log", "run", "log", "node", "run", "log"]
    assert set(seen) == set(VIEWS)


async def test_a_lost_connection_is_said_and_the_view_stays_and_recovers() -> None:
    run = ScriptedRun(running())
    async with shown(run) as (app, pilot):
        run.now = AWAY
        await asked(pilot)
        text = screen_of(app)
        assert "Connection to the coordinator lost" in text
        assert "training: round 2 of 3" in text
        assert "not connected" in text
        run.now = running(cause=Cause(CauseCode.TRAINING, round_number=3, total=3), rounds_decided=2)
        await asked(pilot)
        text = screen_of(app)
        assert "lost" not in text
        assert "training: round 3 of 3" in text
    assert run.is_closed


async def test_without_a_coordinator_its_folder_is_shown() -> None:
    run = ScriptedRun(AWAY, kept=running(time=1000.0))
    async with shown(run) as (app, _):
        text = screen_of(app)
    assert "The coordinator is not running. This is as of" in text
    assert "training: round 2 of 3" in text


async def test_without_anything_it_says_so_and_asks_again() -> None:
    run = ScriptedRun(AWAY)
    async with shown(run) as (app, pilot):
        assert "No connection to the coordinator; asking again." in screen_of(app)
        run.now = running()
        await asked(pilot)
        assert "training: round 2 of 3" in screen_of(app)


async def test_a_coordinator_that_ends_after_its_run_is_no_failure() -> None:
    run = ScriptedRun(running(phase=RunPhase.FINISHED, rounds_decided=10, remaining_seconds=0.0))
    async with shown(run) as (app, pilot):
        run.now = AWAY
        await asked(pilot)
        text = screen_of(app)
    assert "The run is finished, and its coordinator has ended." in text
    assert "10 of 10 rounds, finished" in text


async def test_the_share_of_the_work_does_not_follow_the_weight() -> None:
    status = running()
    assert status.plan is not None
    lighter = tuple(replace(each, weight=0.25 if each.index == 1 else 1.0) for each in status.plan.replicas)
    status = replace(status, plan=replace(status.plan, replicas=lighter))
    report = NodeReport(*("run", B, "cuda:0", "training", (), "", 0.0, 2, 1, 10, 2, 64))
    async with shown(ScriptedRun(status), ScriptedNode(report)) as (app, pilot):
        await pilot.press("3")
        await asked(pilot)
        assert "25% of the work: 1 of 2 stages of replica-1 (weight 20%)" in screen_of(app)


async def test_the_own_node_and_its_share() -> None:
    report = NodeReport(
        *("run", B, "cuda:0", "training", ("neighbour",), "", 0.0, 2, 1, 10, 2, 64),
        inner_steps=3,
        sent_bytes=2_000_000,
        upload_limit=1e6,
        busy=0.25,
        memory_bytes=3_000_000_000,
    )
    node = ScriptedNode(report)
    async with shown(ScriptedRun(running()), node) as (app, pilot):
        await pilot.press("3")
        await asked(pilot)
        text = screen_of(app)
    for part in (
        "training",
        "waits for neighbour",
        "2 of 10, step 1/2",
        "25% of the work: 1 of 2 stages of replica-1 (weight 50%)",
        "computes 25% of the time",
        "of 8.0 Mb/s",
        "2.0 MB over links",
        "no limit",
        "cuda:0, 3.0 GB of its memory",
        B,
    ):
        assert part in text, part


async def test_p_pauses_the_node_and_lets_it_take_part_again() -> None:
    node = ScriptedNode()
    async with shown(ScriptedRun(running()), node) as (app, pilot):
        await pilot.press("p")
        await asked(pilot)
        await pilot.press("3")
        await asked(pilot)
        assert "it was paused by hand" in screen_of(app)
        await pilot.press("p")
        await asked(pilot)
    assert node.calls == ["pause", "resume"]


@pytest.mark.parametrize(("key", "calls"), [("y", ["leave"]), ("n", []), ("escape", []), ("q", [])])
async def test_d_asks_before_the_node_leaves(key: str, calls: list[str]) -> None:
    node = ScriptedNode()
    async with shown(ScriptedRun(running()), node) as (app, pilot):
        await pilot.press("d")
        await pilot.pause()
        assert "Shall this machine's node leave the run?" in screen_of(app)
        await pilot.press("tab")  # turns no view now
        await pilot.press(key)
        await asked(pilot)
        assert "Shall" not in screen_of(app)
        assert app.query_one(TabbedContent).active == "run"
    assert node.calls == calls


async def test_a_refusal_of_the_node_is_shown() -> None:
    node = ScriptedNode()
    async with shown(ScriptedRun(running()), node) as (app, pilot):
        node.trouble = HetnodeError(ErrorCode.NODE_NOT_RUNNING, "No node answers [/].", "Start it.")
        await pilot.press("p")
        await asked(pilot)
        assert "No node answers [/]." in screen_of(app)
        await pilot.press("3")
        await asked(pilot)
        assert "The node does not answer: No node answers" in screen_of(app)
        node.trouble = None
        await asked(pilot)
        assert "does not answer" not in screen_of(app).partition("4 Log")[2].partition("Start")[0]


async def test_without_a_node_the_keys_say_so() -> None:
    async with shown(ScriptedRun(running())) as (app, pilot):
        for key in ("p", "d"):
            await pilot.press(key)
        await pilot.pause()
        assert "No node of this run" in screen_of(app)


async def test_without_a_run_the_node_is_shown() -> None:
    node = ScriptedNode(NodeReport(activity="starting"))
    async with shown(None, node) as (app, pilot):
        await pilot.press("3")
        await asked(pilot)
        text = screen_of(app)
    assert "only this node is shown" in text
    assert "starting" in text


async def test_the_log_follows_its_end() -> None:
    node = ScriptedNode(log=tuple(f"11-23 07:00:00 INFO line {i}" for i in range(100)))
    async with shown(ScriptedRun(running()), node) as (app, pilot):
        await pilot.press("l")
        await asked(pilot)
        assert "line 99" in screen_of(app)
        node.log = (*node.log, "11-23 07:00:01 ERROR the newest")
        await asked(pilot)
        await asked(pilot)
        assert "the newest" in screen_of(app)


async def test_help_lists_the_keys_and_any_key_closes_it() -> None:
    async with shown(ScriptedRun(running())) as (app, pilot):
        await pilot.press("question_mark")
        await pilot.pause()
        assert "pause this machine's node" in screen_of(app)
        await pilot.press("x")
        await pilot.pause()
        assert "pause this machine's node" not in screen_of(app)


async def test_q_ends_the_view() -> None:
    run = ScriptedRun(running())
    async with shown(run) as (app, pilot):
        await pilot.press("q")
        await pilot.pause()
        assert not app.is_running
    assert run.is_closed


@pytest.mark.parametrize("view", "1234")
async def test_what_others_write_is_text(view: str) -> None:
    cause = Cause(CauseCode.MEMORY_LACKING, detail=HOSTILE)
    status = running(cause=cause, run=HOSTILE)
    peers = tuple(replace(peer, problem=HOSTILE, cause=cause, role_reason=HOSTILE) for peer in status.peers)
    node = ScriptedNode(
        NodeReport(peer=A, device=HOSTILE, activity=HOSTILE, waits=(HOSTILE,)), (HOSTILE,), HOSTILE
    )
    async with shown(ScriptedRun(replace(status, peers=peers)), node) as (app, pilot):
        await pilot.press(view)
        await asked(pilot)
        text = screen_of(app)
    assert "[bold]x[/bold] [/]" in text
    assert text.replace("\n", "").isprintable()


async def test_no_view_can_forget_to_clean_a_text() -> None:
    async with shown(ScriptedRun(running())) as (app, pilot):
        app.query_one("#head", Static).update(Text(HOSTILE[:60]))
        app.query_one("#run-text", Static).update(Text(HOSTILE[:60]))
        await pilot.pause()
        text = screen_of(app)
    assert text.count("[bold]x[/bold] [/]") == 2
    assert text.replace("\n", "").isprintable()


async def test_a_large_terminal_is_used() -> None:
    known = {0: [(i, 5.0 - i / 50) for i in range(200)]}
    async with shown(ScriptedRun(running(), known=known), size=(200, 50)) as (app, _):
        text = screen_of(app)
    assert max(line.count("▁") + line.count("▄") + line.count("█") for line in text.splitlines()) >= 30
    assert "nano" in text
