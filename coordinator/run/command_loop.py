"""The command loop owns the state: it decides commands, stores their events, and wakes waiting calls.

Commands are decided in order of arrival, and stored, in a thread. All commands that arrive meanwhile are
stored by the next write: a thousand peers cost a few writes, not a thousand.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from coordinator.run.decide import Applied, decide
from coordinator.run.state import events
from coordinator.run.state.commands import Command, Heartbeat, Start, Tick
from coordinator.run.state.events import Event
from coordinator.run.state.state import State
from coordinator.run.state.transaction import Step
from coordinator.store.store import Store
from protocol.errors import ErrorCode, HetnodeError
from protocol.server.clock import steady_wall_clock
from protocol.status import Cause, CauseCode
from protocol.types import PeerId, Role

log = logging.getLogger(__name__)

RETRY_SECONDS = 1.0  # between two attempts to write on a full disk
STALL_SECONDS = 3.0
"""Ticks come every 0.2 s. After a gap longer than this, the process counts as having been suspended."""
_WOKEN_AT_ONCE = 16
"""Waiting calls that go on in one turn of the event loop. gRPC hands over one new call of a method in each
turn: while a thousand calls went on in one, a thousand heartbeats would wait for a thousand turns."""
T = TypeVar("T")

Topic = tuple[str, int, int]
"""What a call waits for: the group or the decision of a (stage, round), or a change of the run as a whole."""

RUN_TOPIC: Topic = ("run", 0, 0)
ARBITER_TOPIC: Topic = ("arbiter", 0, 0)
"""Payloads are contested."""
ADMISSION_TOPIC: Topic = ("admission", 0, 0)
"""The run has changed, or sources of members were noted or admitted."""

_RUN_EVENTS = (
    events.PlanAdopted,
    events.RunFinished,
    events.RunPaused,
    events.RunResumed,
    events.RunRolledBack,
    events.RunChanged,
    events.PeerBanned,
    events.PeerQuarantined,
    events.PeerUnbanned,
    # The set of followers may change with each of these.
    events.AssignmentReserved,
    events.PeerLost,
    events.PeerLeft,
    events.PeerRetreated,
    events.AnchorDiverged,
    events.LinkFailed,
    events.AddressesChanged,
)


def group_topic(stage: int, round_number: int) -> Topic:
    return ("group", stage, round_number)


def decision_topic(stage: int, round_number: int) -> Topic:
    return ("decision", stage, round_number)


_Issued = tuple[Command, asyncio.Future[Applied] | None]
"""A command, and the future that gets its outcome if its caller waits."""


@dataclass(frozen=True)
class _Decided:
    """The state after a batch of commands, the events that were stored, and the outcome of each command."""

    state: State
    stored: list[Step]
    outcomes: list[Applied]


class Stopped(Exception):
    """The coordinator is stopping. Callers repeat the call after its restart."""


class CommandLoop:
    """The state of one run, and the store of its events.

    Args:
        state: as replayed from `store`.
        on_event: called with each event after it was stored, and the states before and after it.
        clock: the time of events in seconds, never decreasing; None takes :func:`steady_wall_clock`.

    Attributes:
        spec: with which the run began; it has no changes.
        now: the clock.
        after_tick: called after each tick, for what changes with time alone.
        confirmed: awaited between the storing of events and the first answer that follows from them, which
            an error of it prevents.
        hindrance: why no command can be decided now; None if nothing hinders it.
    """

    def __init__(
        self,
        store: Store,
        state: State,
        on_event: Callable[[Event, State, State], None],
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.spec = state.first_spec or state.spec
        self.state = state
        self._store = store
        self._on_event = on_event
        self._commands: asyncio.Queue[_Issued | None] = asyncio.Queue()
        self._waiters: defaultdict[Topic, dict[asyncio.Future[None], None]] = defaultdict(dict)
        self._stopping = False
        self.hindrance: Cause | None = None
        self.after_tick: list[Callable[[], None]] = []
        self.confirmed: Callable[[], Awaitable[None]] | None = None
        self.now = clock or steady_wall_clock(state.latest_at)
        self._ticked_at = self.now()
        self._was_suspended = False
        # One of its own: the threads that all rooms share may all be busy.
        self._thread = ThreadPoolExecutor(1, "commands")
        self._heard: dict[PeerId, float] = {}
        self._heartbeats: dict[PeerId, Heartbeat] = {}

    async def run(self) -> None:
        """Decide commands until :meth:`stop`; they wait while the disk is full. Raises the store's errors."""
        try:
            while (first := await self._commands.get()) is not None:
                batch = [first, *self._arrived()]
                await self._serve([(self._newest(each, answer is None), answer) for each, answer in batch])
        finally:
            self.stop()  # after an error: accept no more commands, and end the waiting calls
            self._thread.shutdown(wait=False)
            for _, answer in self._arrived():
                _answer(answer, Stopped())

    async def execute(self, command: Command) -> None:
        """Decide `command`, and return when its events are stored and applied.

        The command takes effect even if the caller is cancelled during the wait.

        Raises:
            HetnodeError: the refusal.
            Stopped: the loop has stopped.
        """
        answer: asyncio.Future[Applied] = asyncio.get_running_loop().create_future()
        self._issue(command, answer)
        refusal = (await answer).refusal
        if refusal is not None:
            raise refusal

    def submit(self, heartbeat: Heartbeat) -> None:
        """Decide `heartbeat` for a caller that does not wait: a refusal is lost.

        It takes the place of an earlier one of its peer that still waits, so no peer fills the queue.

        Raises Stopped: the loop has stopped.
        """
        if self._stopping or heartbeat.peer not in self._heartbeats:
            self._issue(heartbeat, None)
        self._heartbeats[heartbeat.peer] = heartbeat

    def note_call(self, peer: PeerId) -> None:
        """Note that a call of `peer` has begun: a sign of life, however long the call waits."""
        self._heard[peer] = self.now()

    async def tick(self) -> None:
        """Decide what is due by now."""
        if self._was_suspended or self.now() - self._ticked_at > STALL_SECONDS:
            # The machine was suspended or overloaded, so heartbeats could not be served. As after a restart,
            # silence and deadlines count from now: otherwise all peers would be lost at once.
            self._was_suspended = False
            await self.execute(Start())
        self._heard = {
            peer: at for peer, at in self._heard.items() if self.now() - at < self.spec.timing.lost_after
        }
        await self._execute_awake(Tick(dict(self._heard), self.now()))  # calls go on during the tick
        self._ticked_at = self.now()  # after the tick: a slow store must not look like a suspended machine
        for look in self.after_tick:
            look()

    async def _execute_awake(self, command: Command) -> None:
        """Execute `command`, and note whether this process was suspended meanwhile."""
        execution = asyncio.ensure_future(self.execute(command))
        try:
            is_done = False
            while not is_done:
                awake_at = self.now()
                # A slow store does not hold up the event loop: only a suspended process sleeps for longer.
                is_done = bool((await asyncio.wait({execution}, timeout=STALL_SECONDS / 6))[0])
                self._was_suspended |= self.now() - awake_at > STALL_SECONDS
            execution.result()
        finally:
            execution.cancel()

    async def until(self, topic: Topic, ready: Callable[[State], T | None]) -> T:
        """Wait until `ready(state)` is not None, and return its value. Each event of `topic` calls it again.

        Raises:
            Stopped: the loop has stopped before that.
        """
        while (value := ready(self.state)) is None:
            if self._stopping:
                raise Stopped
            woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            waiters = self._waiters[topic]
            waiters[woken] = None
            try:
                await woken
            finally:
                # A cancelled call leaves no entry behind. `wake` may have replaced the waiters meanwhile.
                waiters.pop(woken, None)
                if not waiters and self._waiters.get(topic) is waiters:
                    del self._waiters[topic]
        return value

    def stop(self) -> None:
        """Wake all waiting calls, and let :meth:`run` return after the commands that have arrived."""
        if not self._stopping:
            self._stopping = True
            self._commands.put_nowait(None)
            for topic in list(self._waiters):
                self.wake(topic)

    def _issue(self, command: Command, answer: asyncio.Future[Applied] | None) -> None:
        if self._stopping:
            raise Stopped
        self._commands.put_nowait((command, answer))

    def _arrived(self) -> list[_Issued]:
        """The commands that have arrived. None, which marks the end, stays in the queue."""
        batch = []
        while not self._commands.empty():
            item = self._commands.get_nowait()
            if item is None:
                self._commands.put_nowait(None)
                break
            batch.append(item)
        return batch

    async def _serve(self, batch: list[_Issued]) -> None:
        try:
            while (decided := await self._decided([command for command, _ in batch])) is None:
                await asyncio.sleep(RETRY_SECONDS)
                # Who has given up asks again. Silence and deadlines count from the time when there is space.
                waiting = (*batch, *self._arrived())
                still = [each for each in waiting if each[1] is None or not each[1].done()]
                batch = still if isinstance(batch[0][0], Start) else [(Start(), None), *still]
            if decided.stored and self.confirmed is not None:
                await self.confirmed()
        except BaseException:
            # Nothing of the batch is certain to last, so no caller may learn an outcome.
            for _, answer in batch:
                _answer(answer, Stopped())
            raise
        # Only now: no reader may see a state that a crash could take back.
        self.state = decided.state
        for step in decided.stored:
            self._on_event(*step)
        topics = dict.fromkeys(topic for step in decided.stored for topic in _topics(step.event))  # ordered
        if any(isinstance(step.event, events.PeerBanned | events.PeerQuarantined) for step in decided.stored):
            topics |= dict.fromkeys(
                self._waiters
            )  # an excluded peer may wait for any, and its calls must end
        for topic in topics:
            self.wake(topic)
        for (_, answer), outcome in zip(batch, decided.outcomes, strict=True):
            _answer(answer, outcome)

    async def _decided(self, issued: list[Command]) -> _Decided | None:
        """What follows from the commands, stored; None if the disk is full, and nothing has changed."""
        try:
            # A thread: other calls go on while a plan is searched or events are written. Heartbeats alone
            # take less time than a thread.
            if self._store.blocks and not all(isinstance(command, Heartbeat) for command in issued):
                decide_them = partial(self._decide_and_store, self.state, issued)
                decided = await asyncio.get_running_loop().run_in_executor(self._thread, decide_them)
            else:
                decided = self._decide_and_store(self.state, issued)
        except HetnodeError as error:
            if error.code is not ErrorCode.DISK_FULL or self._stopping:
                raise
            if self.hindrance is None:
                log.error("the run waits: %s", error)
            self.hindrance = Cause(CauseCode.DISK_FULL, detail=error.cause)
            return None
        if self.hindrance is not None:
            log.info("the disk takes the event log again, and the run goes on")
        self.hindrance = None
        return decided

    def _newest(self, command: Command, is_submitted: bool) -> Command:
        """`command`, or the heartbeat that has taken its place."""
        if is_submitted and isinstance(command, Heartbeat):
            return self._heartbeats.pop(command.peer)
        return command

    def _decide_and_store(self, state: State, issued: Sequence[Command]) -> _Decided:
        """Decide commands in their order, and store their events. Changes nothing of this object.

        Raises what the store raises.
        """
        stored, outcomes = list[Step](), list[Applied]()
        for command in issued:
            # Each command sees the events of those before it, although nothing is stored yet.
            outcome = decide(state, command, self.now())
            state = outcome.state
            stored += [step for step in outcome.steps if not isinstance(step.event, events.PeerSeen)]
            outcomes.append(outcome)
        if stored:
            self._store.append([step.event for step in stored])
        return _Decided(state, stored, outcomes)

    def wake(self, topic: Topic) -> None:
        """Let all calls that wait for `topic` look again. For what is not a part of the state."""
        if waiters := self._waiters.pop(topic, None):
            self._wake_some(list(waiters))

    def _wake_some(self, waiters: list[asyncio.Future[None]]) -> None:
        for woken in waiters[:_WOKEN_AT_ONCE]:
            if not woken.done():
                woken.set_result(None)
        if rest := waiters[_WOKEN_AT_ONCE:]:
            asyncio.get_running_loop().call_soon(self._wake_some, rest)


def _answer(answer: asyncio.Future[Applied] | None, what: Applied | Stopped) -> None:
    if answer is None or answer.done():  # the caller does not wait, or was cancelled
        return
    if isinstance(what, Stopped):
        answer.set_exception(what)
    else:
        answer.set_result(what)


def _topics(event: Event) -> tuple[Topic, ...]:
    """The topics whose waiting calls `event` may end."""
    match event:
        case events.GroupClosed():
            return (group_topic(event.stage, event.round_number),)
        case events.RoundDecided():
            key = (event.decision.stage, event.decision.round_number)
            # A round without offers is decided without a group.
            return (group_topic(*key), decision_topic(*key))
        case events.PayloadsContested():
            return (ARBITER_TOPIC,)
        case events.PeerJoined(role=Role.RELAY):
            return (RUN_TOPIC,)
        case _:
            return (RUN_TOPIC, ADMISSION_TOPIC) if isinstance(event, _RUN_EVENTS) else ()
