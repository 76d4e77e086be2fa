"""Nodes that are asked to leave finish their round, keep their progress, and hold nobody up."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from coordinator.state.events import PeerDraining, PeerLost, PeerRetreated
from node.cli.leave import Node, ask_to_leave, chosen
from node.command_runner import LEAVE, LEAVE_AT_ONCE
from node.folder import keep_only_run, lock_folder, node_folder_of, remember_node_folder, running_process
from node.net.admission import announce_leaving
from node.net.coordinator_client import CoordinatorClient
from node.net.link import Link
from node.net.membership import Membership
from node.security import credentials
from node.train.pipeline import Pipeline
from protocol.errors import ErrorCode, HetnodeError
from protocol.types import Role
from tests.virtual.network import here
from tests.virtual.scenario import FULL, MIXED, Play, contributions, departures, swarm_spec
from tests.virtual.swarm import VirtualSwarm


def nobody_was_lost(swarm: VirtualSwarm) -> bool:
    return not any(isinstance(event, PeerLost | PeerRetreated) for event in swarm.events)


def test_a_full_replica_finishes_its_round_and_leaves_and_the_others_go_on(play: Play) -> None:
    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        await swarm.until_round(3)
        await asyncio.sleep(0.6)
        swarm.drain("b")
        await swarm.until_over("b", seconds=20)
        assert departures(swarm, "b") == ["drained"]
        await swarm.until_over()
        swarm.assert_all_agree("a", "c")
        assert contributions(swarm, "b") == [1, 2, 3]
        assert swarm.committed(0) == [1, 2, 3, 4, 5, 6]
        assert nobody_was_lost(swarm)
        assert [event.peer for event in swarm.events if isinstance(event, PeerDraining)] == [swarm.peer("b")]

    play(scenario)


@pytest.mark.parametrize("name", ["p", "q"])
def test_a_member_of_a_pipeline_that_leaves_takes_its_round_to_the_end(play: Play, name: str) -> None:
    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        await swarm.until_round(3)
        await asyncio.sleep(0.6)
        swarm.drain(name)
        await swarm.until_over(name, seconds=20)
        assert contributions(swarm, "p") == contributions(swarm, "q") == [1, 2, 3]
        other = "q" if name == "p" else "p"
        await swarm.until_over("a", "b", other)
        swarm.assert_all_agree("a", "b", other)
        assert swarm.committed(1) == [1, 2, 3, 4, 5, 6]
        assert nobody_was_lost(swarm)  # its neighbour saw the link end in order

    play(scenario, MIXED)


def test_who_is_asked_too_late_for_the_next_plan_parts_from_its_neighbours(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    validate, part = Pipeline.validate, Link.part
    parted: list[str] = []

    async def scenario(swarm: VirtualSwarm) -> None:
        async def ask_then_validate(self: Pipeline, round_number: int) -> float:
            if (here(), round_number) == ("p", 3):
                swarm.drain("p")
            return await validate(self, round_number)

        async def note_then_part(self: Link, deadline: float) -> None:
            parted.append(here())
            await part(self, deadline)

        async def unheard(self: CoordinatorClient, reason: str) -> None:
            pass

        monkeypatch.setattr(Pipeline, "validate", ask_then_validate)
        monkeypatch.setattr(Link, "part", note_then_part)
        monkeypatch.setattr(CoordinatorClient, "drain", unheard)
        swarm.start()
        await swarm.until_over("p", seconds=100)
        assert parted == ["p"]  # what its neighbour validates with may be under way until then
        assert contributions(swarm, "p") == [1, 2, 3]
        await swarm.until_over("a", "b")

    play(scenario, MIXED)


def test_who_was_drained_goes_on_where_it_was_when_it_is_started_again(play: Play) -> None:
    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        await swarm.until_round(3)
        swarm.drain("b")
        await swarm.until_over("b", seconds=20)
        kept = swarm.nodes["b"].folder / "checkpoint" / f"round-{max(contributions(swarm, 'b')):06d}"
        assert kept.exists()
        swarm.start("b")
        await swarm.until_over()
        swarm.assert_all_agree()
        assert contributions(swarm, "b")[-1] == 8

    play(scenario, spec=swarm_spec(FULL, rounds=8))


def test_who_only_follows_leaves_at_once(play: Play) -> None:
    members = {"a": Role.REPLICA, "p": Role.STAGE, "q": Role.STAGE, "spare": Role.STAGE}
    spec = swarm_spec({name: members[name] for name in "apq"}, rounds=6)

    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start("a", "p", "q")
        await swarm.until_round(2)
        swarm.start("spare")
        await swarm.until_round(4)
        asked = swarm.loop.time()
        swarm.drain("spare")
        await swarm.until_over("spare")
        assert swarm.loop.time() - asked < 0.5  # a round takes several times as long
        assert departures(swarm, "spare") == ["drained"]
        await swarm.until_over()
        swarm.assert_all_agree("a", "p", "q")
        assert contributions(swarm, "p") == [1, 2, 3, 4, 5, 6]

    play(scenario, members, spec)


def test_who_is_asked_to_leave_before_the_run_starts_does(play: Play) -> None:
    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start("a", "b")
        await swarm.until(lambda state: len(state.peers) == 2)
        await asyncio.sleep(5)
        swarm.drain("b")
        await swarm.until_over("b", seconds=5)
        assert departures(swarm, "b") == ["drained"]

    play(scenario)


def test_who_waits_for_a_coordinator_that_is_away_leaves_at_once(play: Play) -> None:
    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.coordinator.kill()
        swarm.start("b")
        await asyncio.sleep(5)
        assert swarm.nodes["b"].is_running
        swarm.drain("b")
        await swarm.until_over("b", seconds=3)
        assert not swarm.nodes["b"].errors

    play(scenario)


def test_who_is_still_entering_the_dht_says_farewell_and_leaves_at_once(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start("b")
        await swarm.until(lambda state: len(state.peers) == 1)
        await asyncio.sleep(5)
        swarm.drain("b")
        await swarm.until_over("b", seconds=3)
        assert departures(swarm, "b") == ["drained"]

    async def hang(self: VirtualSwarm, **_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(VirtualSwarm, "start_transport", hang)
    play(scenario)


def test_a_coordinator_that_was_away_hears_of_it_when_it_is_back_and_the_round_is_awaited(play: Play) -> None:
    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        await swarm.until_round(3)
        await asyncio.sleep(0.6)
        swarm.coordinator.kill()
        swarm.drain("b")
        await asyncio.sleep(30)
        assert swarm.nodes["b"].is_running  # what it has learned in this round is not given up
        await swarm.coordinator.start()
        await swarm.until_over("b", seconds=60)
        assert [event.peer for event in swarm.events if isinstance(event, PeerDraining)] == [swarm.peer("b")]
        await swarm.until_over()
        swarm.assert_all_agree("a", "c")
        assert contributions(swarm, "b") == [1, 2, 3]

    play(scenario)


async def test_a_node_that_has_joined_again_tells_again_that_it_leaves() -> None:
    told: asyncio.Queue[str] = asyncio.Queue()

    class Coordinator:
        async def drain(self, reason: str) -> None:
            told.put_nowait(reason)
            if told.qsize() > 1:
                raise HetnodeError(ErrorCode.UNKNOWN_PEER, "Who?", "")

    coordinator: Any = Coordinator()
    leaving = asyncio.Event()

    async def join() -> None:
        pass

    membership = Membership(coordinator, join, heartbeat=1.0)
    announcing = asyncio.create_task(announce_leaving(leaving, coordinator, membership))
    leaving.set()
    async with asyncio.timeout(10):
        for _ in range(3):
            await told.get()
            await membership.rejoin(membership.run_view.session)
        await told.get()
    announcing.cancel()


# The process around it


@pytest.fixture
def process(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that says "ready", and "draining" when asked to; it ends well at a line from its input."""
    program = """
        import asyncio, sys
        from node import command_runner

        async def main():
            try:
                line = asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
                print("ready", flush=True)
                await asyncio.shield(line)
            except asyncio.CancelledError:
                print("cancelled", flush=True)
                await line  # what it keeps
                print("kept", flush=True)
                raise

        begin = lambda: print("draining", flush=True)
        try:
            command_runner.run(main(), None, command_runner.Drain(begin, float(sys.argv[1]), "words"))
        except command_runner.Interrupted:
            import os
            os._exit(130)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]

    def start(seconds: float) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [*command, str(seconds)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        return child

    started: list[subprocess.Popen[str]] = []
    yield start  # type: ignore[misc]
    for child in started:
        child.kill()
        child.communicate()


def said(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


@pytest.mark.parametrize("asked", [signal.SIGTERM, signal.SIGINT, LEAVE])
def test_the_first_signal_lets_a_process_finish_and_end_well(process, asked: int) -> None:  # type: ignore[no-untyped-def]
    child = process(1000.0)
    child.send_signal(asked)
    assert said(child) == "draining"
    child.communicate("finished\n", timeout=30)
    assert child.returncode == 0


@pytest.mark.parametrize("first", [signal.SIGTERM, LEAVE])
def test_the_next_signal_lets_it_keep_what_there_is(process, first: int) -> None:  # type: ignore[no-untyped-def]
    child = process(1000.0)
    child.send_signal(first)
    assert said(child) == "draining"
    child.send_signal(signal.SIGINT)
    assert said(child) == "cancelled"
    child.send_signal(LEAVE_AT_ONCE)  # changes nothing any more
    assert child.communicate("kept\n", timeout=30)[0] == "kept\n"
    assert child.returncode == 130


def test_one_signal_more_ends_it_as_it_is(process) -> None:  # type: ignore[no-untyped-def]
    child = process(1000.0)
    for words in ("draining", "cancelled"):
        child.send_signal(signal.SIGTERM)
        assert said(child) == words
    child.send_signal(signal.SIGTERM)
    assert child.wait(30) == 130
    assert said(child) == ""


def test_a_supervisor_that_ends_who_is_leaving_already_loses_nothing(process) -> None:  # type: ignore[no-untyped-def]
    child = process(1000.0)
    child.send_signal(LEAVE_AT_ONCE)
    assert said(child) == "cancelled"
    child.send_signal(signal.SIGTERM)
    assert child.communicate("kept\n", timeout=30)[0] == "kept\n"
    child.wait(30)


def test_the_end_of_its_time_does_not_interrupt_what_it_keeps(process) -> None:  # type: ignore[no-untyped-def]
    child = process(0.3)
    child.send_signal(signal.SIGTERM)
    assert said(child) == "draining"
    child.send_signal(signal.SIGTERM)
    assert said(child) == "cancelled"
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.6)  # the time for draining is over meanwhile
    assert child.communicate("kept\n", timeout=30)[0] == "kept\n"


def test_to_be_asked_to_leave_again_changes_nothing(process) -> None:  # type: ignore[no-untyped-def]
    child = process(1000.0)
    child.send_signal(LEAVE)
    assert said(child) == "draining"
    child.send_signal(LEAVE)
    child.communicate("finished\n", timeout=30)
    assert child.returncode == 0


@pytest.mark.parametrize(
    ("seconds", "asked"), [(0.05, signal.SIGTERM), (0.0, LEAVE), (1000.0, LEAVE_AT_ONCE)]
)
def test_without_time_to_drain_it_leaves_in_order(process, seconds: float, asked: int) -> None:  # type: ignore[no-untyped-def]
    child = process(seconds)
    child.send_signal(asked)
    words = said(child)
    if words == "draining":
        words = said(child)
    assert words == "cancelled"
    child.communicate("", timeout=30)
    assert child.returncode == 130


# Whom 'hetnode leave' means


@contextmanager
def node_in(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that keeps `folder` as a node does, and ends well when it is asked to leave."""
    program = """
        import signal, sys
        from pathlib import Path
        from node.folder import lock_folder

        with lock_folder(Path(sys.argv[1])):
            asked = {signal.SIGUSR1, signal.SIGUSR2}
            signal.pthread_sigmask(signal.SIG_BLOCK, asked)
            print("ready", flush=True)
            print(signal.sigwait(asked), flush=True)
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert said(child) == "ready"
            yield child
        finally:
            child.kill()


@pytest.fixture
def two_runs(tmp_path: Path) -> Iterator[list[Node]]:
    """Nodes of two runs, of which the first one's is running."""
    nodes = []
    for name in ("first", "second"):
        folder, own = tmp_path / name, tmp_path / "peer-0.runs" / name
        folder.mkdir()
        own.mkdir(parents=True)
        keep_only_run(folder, name, "coordinator")
        remember_node_folder(own, folder)
        nodes.append(Node(name, own, node_folder_of(own)))
    with node_in(tmp_path / "first"):
        yield nodes


def test_the_folder_of_a_node_names_its_process_while_it_runs(tmp_path: Path) -> None:
    assert running_process(tmp_path) is None
    (tmp_path / "lock").write_text("1")  # of former nodes, or of nobody
    assert running_process(tmp_path) is None
    with node_in(tmp_path) as child:
        assert running_process(tmp_path) == child.pid
        with pytest.raises(HetnodeError) as refused:
            lock_folder(tmp_path)
        assert refused.value.code is ErrorCode.RUN_FOLDER_IN_USE
    assert running_process(tmp_path) is None


def test_whoever_looks_does_not_keep_a_node_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locks: list[object] = []
    monkeypatch.setattr("node.folder.fcntl.lockf", lambda *arguments: locks.append(arguments))
    monkeypatch.setattr("node.folder.fcntl.flock", lambda *arguments: locks.append(arguments), raising=False)
    (tmp_path / "lock").touch()
    assert running_process(tmp_path) is None
    assert not locks


@pytest.mark.parametrize(("arguments", "sent"), [([], LEAVE), (["--now"], LEAVE_AT_ONCE)])
def test_a_node_of_this_machine_is_asked_to_leave(tmp_path: Path, arguments: list[str], sent: int) -> None:
    keep_only_run(tmp_path, "first", "coordinator")
    with node_in(tmp_path) as child:
        command = [sys.executable, "-m", "node", "leave", str(tmp_path), *arguments]
        asking = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert said(child) == f"{int(sent)}"
        child.wait(30)
        assert "the node has left first" in asking.communicate(timeout=30)[0]
    assert asking.returncode == 0


def test_nobody_is_signalled_who_is_not_the_node(tmp_path: Path) -> None:
    """Its process may have ended since, and the number be that of another one, such as this one."""
    keep_only_run(tmp_path, "first", "coordinator")
    with pytest.raises(HetnodeError) as refused:
        ask_to_leave(Node("first", None, tmp_path), 0, LEAVE)
    assert "container" in refused.value.cause
    received: list[int] = []
    former = signal.signal(LEAVE, lambda number, _: received.append(number))
    try:
        ask_to_leave(Node("first", None, tmp_path), os.getpid(), LEAVE)
    finally:
        signal.signal(LEAVE, former)
    assert not received


def test_the_only_node_that_runs_is_meant_unless_another_is_named(two_runs: list[Node]) -> None:
    first, second = two_runs
    assert chosen(None, two_runs) == chosen("first", two_runs) == first
    assert chosen("second", two_runs) == second
    assert first.pid
    assert second.pid is None
    assert second.identity == second.credentials.parent.with_suffix(".key")  # type: ignore[union-attr]
    assert chosen(str(second.folder), two_runs) == second
    assert chosen(str(first.folder), []) == Node("first", None, first.folder)


def test_who_is_not_meant_clearly_is_named(two_runs: list[Node], tmp_path: Path) -> None:
    again = Node("first", tmp_path / "peer-1.runs" / "first", two_runs[0].folder)
    for known, wanted, code in (
        ([*two_runs, again], "first", ErrorCode.BAD_OPTION),
        ([*two_runs, again], None, ErrorCode.BAD_OPTION),
        (two_runs, "third", ErrorCode.NO_CREDENTIALS),
        (two_runs[1:], None, ErrorCode.NO_CREDENTIALS),
        ([], None, ErrorCode.NO_CREDENTIALS),
    ):
        with pytest.raises(HetnodeError) as refused:
            chosen(wanted, known)
        assert refused.value.code is code
        assert code is ErrorCode.NO_CREDENTIALS or "peer-1.runs" in refused.value.cause


def test_a_folder_of_credentials_says_which_run_it_is_of(
    two_runs: list[Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = two_runs[1].credentials
    assert folder is not None

    class Loaded:
        run = "second"

    monkeypatch.setattr(credentials, "exist", lambda path: path == folder)
    monkeypatch.setattr(credentials, "load", lambda path: Loaded)
    assert chosen(str(folder), []) == two_runs[1]
