"""The owner of the coordinator's state, and time that does not pass as it should."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import pytest

from coordinator.api.run_news import RunNews
from coordinator.run import command_loop as loop_module
from coordinator.run.command_loop import STALL_SECONDS, CommandLoop, Stopped
from coordinator.run.decide import Applied
from coordinator.run.state.commands import Command, Heartbeat, Start, Tick
from coordinator.run.state.events import Event, PeerJoined
from coordinator.run.state.state import State
from protocol.errors import ErrorCode, HetnodeError
from protocol.server.clock import steady_wall_clock
from protocol.status import CauseCode
from protocol.types import Role
from tests.builders import keyed, spec_of
from tests.support.memory_store import MemoryStore

SPEC = spec_of(replicas=2)


class _Clock:
    """Time as the test has it pass."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> _Clock:
    return _Clock()


@pytest.fixture
async def command_loop(clock: _Clock) -> AsyncIterator[CommandLoop]:
    command_loop = CommandLoop(MemoryStore(), State(SPEC, SPEC.name), lambda *_: None, clock)
    serving = asyncio.create_task(command_loop.run())
    await command_loop.execute(keyed(1).join(SPEC, Role.REPLICA))
    yield command_loop
    command_loop.stop()
    await serving


async def test_a_suspended_coordinator_declares_no_peer_lost(
    command_loop: CommandLoop, clock: _Clock
) -> None:
    clock.now += 10 * SPEC.timing.lost_after
    await command_loop.tick()
    assert command_loop.state.peers[keyed(1).peer].is_live


async def test_a_peer_that_stays_silent_while_the_coordinator_runs_is_lost(
    command_loop: CommandLoop, clock: _Clock
) -> None:
    for _ in range(int(2 * SPEC.timing.lost_after / STALL_SECONDS) + 3):
        clock.now += STALL_SECONDS / 2
        await command_loop.tick()
    assert not command_loop.state.peers[keyed(1).peer].is_live


async def test_a_peer_whose_calls_wait_is_not_lost(command_loop: CommandLoop, clock: _Clock) -> None:
    for _ in range(int(2 * SPEC.timing.lost_after / STALL_SECONDS) + 3):
        clock.now += STALL_SECONDS / 2
        command_loop.note_call(keyed(1).peer)  # its heartbeat is not decided yet
        await command_loop.tick()
    assert command_loop.state.peers[keyed(1).peer].is_live


async def test_a_coordinator_that_was_suspended_during_a_tick_declares_no_peer_lost(
    command_loop: CommandLoop, clock: _Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, suspended = loop_module.decide, iter([True])

    def decide_after_suspension(state: State, command: Command, now: float) -> Applied:
        if isinstance(command, Tick) and next(suspended, False):
            clock.now += 10 * SPEC.timing.lost_after
        return original(state, command, clock.now)

    monkeypatch.setattr(loop_module, "decide", decide_after_suspension)
    for _ in range(2):
        await command_loop.tick()
        assert command_loop.state.peers[keyed(1).peer].is_live
    assert not next(suspended, False), "the tick that was suspended"


async def test_commands_are_decided_while_all_shared_threads_are_busy(
    command_loop: CommandLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MemoryStore, "blocks", True)
    free = threading.Event()
    busy = [asyncio.create_task(asyncio.to_thread(free.wait, 5)) for _ in range(32)]
    await command_loop.tick()
    free.set()
    assert all(await asyncio.gather(*busy))


async def test_calls_go_on_while_a_command_is_decided(
    command_loop: CommandLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    decided, others_went_on = asyncio.Event(), threading.Event()
    event_loop, original = asyncio.get_running_loop(), loop_module.decide

    def decide_slowly(state: State, command: Command, now: float) -> Applied:
        event_loop.call_soon_threadsafe(decided.set)
        assert others_went_on.wait(timeout=30), "the event loop decides itself"
        return original(state, command, now)

    monkeypatch.setattr(loop_module, "decide", decide_slowly)
    monkeypatch.setattr(MemoryStore, "blocks", True)
    deciding = asyncio.create_task(command_loop.execute(Start()))
    await decided.wait()
    others_went_on.set()
    await deciding


async def test_of_the_heartbeats_of_a_peer_that_wait_the_newest_is_decided_alone(
    command_loop: CommandLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    decided = list[Command]()
    original = loop_module.decide

    def noting(state: State, command: Command, now: float) -> Applied:
        decided.append(command)
        return original(state, command, now)

    monkeypatch.setattr(loop_module, "decide", noting)
    await command_loop.execute(keyed(2).join(SPEC, Role.REPLICA))
    decided.clear()
    for step in range(1000):
        command_loop.submit(Heartbeat(keyed(1).peer, 1, step))
    command_loop.submit(Heartbeat(keyed(2).peer, 1, 5))
    await command_loop.execute(Tick())
    command_loop.submit(Heartbeat(keyed(1).peer, 1, 1000))
    await command_loop.execute(Tick())
    beats = [(each.peer, each.inner_step) for each in decided if isinstance(each, Heartbeat)]
    assert beats == [(keyed(1).peer, 999), (keyed(2).peer, 5), (keyed(1).peer, 1000)]


async def test_a_loop_that_has_stopped_takes_no_heartbeat_for_one_that_waits(
    command_loop: CommandLoop,
) -> None:
    command_loop.submit(Heartbeat(keyed(1).peer, 1, 0))
    command_loop.stop()
    with pytest.raises(Stopped):
        command_loop.submit(Heartbeat(keyed(1).peer, 1, 1))


async def test_calls_that_wait_for_a_topic_are_woken_in_their_order(command_loop: CommandLoop) -> None:
    """What a state tells first does not depend on addresses in memory, so a virtual swarm repeats exactly."""
    is_open, woken = False, list[int]()

    async def wait(number: int) -> None:
        await command_loop.until(loop_module.RUN_TOPIC, lambda _: is_open or None)
        woken.append(number)

    async with asyncio.TaskGroup() as waiting:
        for number in range(40):
            waiting.create_task(wait(number))
        await asyncio.sleep(0)
        is_open = True
        command_loop.wake(loop_module.RUN_TOPIC)
    assert woken == [*range(40)]


def test_the_clock_of_a_ledger_is_by_default_the_wall_clock() -> None:
    command_loop = CommandLoop(MemoryStore(), State(SPEC, SPEC.name), lambda *_: None)
    before = command_loop.now()
    assert command_loop.now() >= before > 1.7e9


def test_time_goes_on_where_the_clock_was_set_back_while_the_coordinator_was_away() -> None:
    newest = time.time() + 600
    assert steady_wall_clock(newest)() >= newest
    assert steady_wall_clock(0.0)() < newest


async def test_watchers_of_a_large_swarm_are_told_less_often_why_the_run_waits(
    command_loop: CommandLoop, clock: _Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.api.run_news.STALL_UPDATES_PER_SECOND", 1 / STALL_SECONDS)
    monkeypatch.setattr("coordinator.api.run_news.stall_message", lambda *_: f"waits at {clock.now}")
    RunNews(command_loop)
    woken: list[float] = []
    monkeypatch.setattr(command_loop, "wake", lambda topic: woken.append(clock.now))
    begin = clock.now
    for _ in range(7):
        await command_loop.tick()
        clock.now += STALL_SECONDS / 3
    assert woken == [begin, begin + STALL_SECONDS, begin + 2 * STALL_SECONDS], "the one peer, every so often"


class _FullStore(MemoryStore):
    """A log on a disk that is full for some attempts."""

    refusals = 0

    def append(self, events: Sequence[Event]) -> None:
        if self.refusals:
            self.refusals -= 1
            raise HetnodeError(ErrorCode.DISK_FULL, "The disk is full.", "Make room.")
        super().append(events)


async def test_commands_wait_while_the_disk_is_full_and_no_peer_is_lost_by_that(
    clock: _Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, causes = _FullStore(), list[CauseCode]()
    command_loop = CommandLoop(store, State(SPEC, SPEC.name), lambda *_: None, clock)

    async def pass_time(_: float, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        assert command_loop.hindrance is not None
        causes.append(command_loop.hindrance.code)
        clock.now += SPEC.timing.lost_after
        await sleep(0)

    monkeypatch.setattr(loop_module.asyncio, "sleep", pass_time)
    serving = asyncio.create_task(command_loop.run())
    await command_loop.execute(keyed(1).join(SPEC, Role.REPLICA))
    store.refusals = 3
    await asyncio.gather(command_loop.tick(), command_loop.execute(keyed(2).join(SPEC, Role.REPLICA)))
    assert causes == [CauseCode.DISK_FULL] * 3
    assert command_loop.hindrance is None
    assert all(command_loop.state.peers[keyed(each).peer].is_live for each in (1, 2))
    command_loop.stop()
    await serving


async def test_calls_that_are_given_up_while_the_disk_is_full_wait_no_longer(
    clock: _Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, seen = _FullStore(), list[Event]()
    command_loop = CommandLoop(store, State(SPEC, SPEC.name), lambda event, *_: seen.append(event), clock)
    sleep = asyncio.sleep
    monkeypatch.setattr(loop_module.asyncio, "sleep", lambda _: sleep(0))
    serving = asyncio.create_task(command_loop.run())
    store.refusals = 1_000_000
    for number in range(20):
        call = asyncio.create_task(command_loop.execute(keyed(number).join(SPEC, Role.REPLICA)))
        await sleep(0)
        call.cancel()
        await asyncio.wait([call])
    store.refusals = 1
    await command_loop.execute(keyed(30).join(SPEC, Role.REPLICA))
    assert [event.peer for event in seen if isinstance(event, PeerJoined)] == [keyed(30).peer]
    command_loop.stop()
    await serving
