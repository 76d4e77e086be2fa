"""The only owner of the state: it decides commands, stores their events, and wakes the calls that wait.

Commands are decided in order of arrival. Those that arrive while the store writes are decided together and
stored in one write, so the commands of a thousand peers cost a few writes, not a thousand.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TypeVar

from coordinator.decide import Outcome, decide
from coordinator.state.commands import Command, Start, Tick
from coordinator.state.events import (
    AnchorDiverged,
    AssignmentReserved,
    Event,
    GroupClosed,
    PeerBanned,
    PeerLeft,
    PeerLost,
    PeerQuarantined,
    PeerRetreated,
    PeerSeen,
    PeerUnbanned,
    PlanAdopted,
    RoundAborted,
    RoundCommitted,
    RunFinished,
)
from coordinator.state.state import State
from coordinator.state.transaction import Transaction
from coordinator.status.messages import run_message, stall_message
from coordinator.store import Store
from protocol.spec.run import RunSpec

STALL_SECONDS = 3.0
"""Ticks come every 0.2 s. After a longer gap than this, the process counts as suspended meanwhile."""
T = TypeVar("T")

Topic = tuple[str, int, int]
"""What a call waits for: the group or the decision of a (stage, round), or a change of the run as a whole."""

RUN_TOPIC: Topic = ("run", 0, 0)


def group_topic(stage: int, round_number: int) -> Topic:
    return ("group", stage, round_number)


def decision_topic(stage: int, round_number: int) -> Topic:
    return ("decision", stage, round_number)


def steady_wall_clock(not_before: float = 0.0) -> Callable[[], float]:
    """A clock that starts at the wall clock's time and then runs steadily.

    Stored times must continue across restarts, and must not jump when the wall clock is set.

    Args:
        not_before: the time of the newest stored event. If the wall clock was set back since, the
            clock starts there instead: otherwise deadlines would wait for the difference.
    """
    offset = max(time.time(), not_before) - time.monotonic()
    return lambda: offset + time.monotonic()


class Stopped(Exception):
    """The coordinator is stopping. The caller should ask again once it has been restarted."""


class CommandLoop:
    """The state of one run, and the store of its events.

    Args:
        state: as replayed from `store`.
        on_event: called with each event after it was stored, and the state after its whole batch.
        on_message: called with the run's message whenever a tick finds it changed.
        clock: the time of events in seconds, never decreasing; None takes :func:`steady_wall_clock`.
    """

    def __init__(
        self,
        spec: RunSpec,
        store: Store,
        state: State,
        on_event: Callable[[Event, State], None],
        on_message: Callable[[str], None],
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.spec = spec
        self.state = state
        self._store = store
        self._on_event = on_event
        self._on_message = on_message
        self._commands: asyncio.Queue[tuple[Command, asyncio.Future[Outcome]] | None] = asyncio.Queue()
        self._waiters: defaultdict[Topic, set[asyncio.Future[None]]] = defaultdict(set)
        self._stopping = False
        self._message = ""
        self._stall_message = ""
        self._clock = clock or steady_wall_clock(state.latest_at)
        self._ticked_at = self.now()

    def now(self) -> float:
        """Seconds on the clock of the events."""
        return self._clock()

    async def run(self) -> None:
        """Decide commands until :meth:`stop`. Raises the error of the store if it fails, and then stops."""
        try:
            while (first := await self._commands.get()) is not None:
                await self._serve([first, *self._arrived()])
        finally:
            self.stop()
            for _, answer in self._arrived():
                _answer(answer, Stopped())

    async def execute(self, command: Command) -> None:
        """Decide `command` and return once its events are stored and applied.

        The command counts even if the caller is cancelled meanwhile.

        Raises:
            HetnodeError: the refusal.
            Stopped: the loop has stopped.
        """
        if self._stopping:
            raise Stopped
        answer: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._commands.put_nowait((command, answer))
        refusal = (await answer).refusal
        if refusal is not None:
            raise refusal

    async def tick(self) -> None:
        """Decide what is due by now, and report the run's message if it has changed.

        If this process itself did not run for a while (a suspended or overloaded machine), peers had no
        chance to be heard. That counts as a restart: silence is counted from now on.
        """
        if self.now() - self._ticked_at > STALL_SECONDS:
            await self.execute(Start())
        await self.execute(Tick())
        self._ticked_at = self.now()
        message = run_message(self.state, self.spec)
        if message != self._message:
            self._message = message
            self._on_message(message)
        stall = stall_message(self.state, self.spec)
        if stall != self._stall_message:
            self._stall_message = stall
            self._wake(RUN_TOPIC)

    async def until(self, topic: Topic, ready: Callable[[State], T | None]) -> T:
        """Wait until `ready(state)` is not None, and return it. It is called again on every event of `topic`.

        Raises:
            Stopped: the loop stopped before.
        """
        while (value := ready(self.state)) is None:
            if self._stopping:
                raise Stopped
            woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            waiters = self._waiters[topic]
            waiters.add(woken)
            try:
                await woken
            finally:
                waiters.discard(woken)
                if not waiters and self._waiters.get(topic) is waiters:
                    del self._waiters[topic]
        return value

    def stop(self) -> None:
        """Wake all calls that wait, and let :meth:`run` return after the commands that have arrived."""
        if not self._stopping:
            self._stopping = True
            self._commands.put_nowait(None)
            for topic in list(self._waiters):
                self._wake(topic)

    def _arrived(self) -> list[tuple[Command, asyncio.Future[Outcome]]]:
        """The commands that have arrived. None, the mark of the end, stays in the queue."""
        batch = []
        while not self._commands.empty():
            item = self._commands.get_nowait()
            if item is None:
                self._commands.put_nowait(None)
                break
            batch.append(item)
        return batch

    async def _serve(self, batch: list[tuple[Command, asyncio.Future[Outcome]]]) -> None:
        transaction = Transaction(self.state)
        outcomes = []
        try:
            for command, _ in batch:
                outcome = decide(transaction.state, self.spec, command, self.now())
                for event in outcome.events:
                    transaction.add(event)
                outcomes.append(outcome)
            stored = [event for event in transaction.events if not isinstance(event, PeerSeen)]
            if stored:
                await self._append(stored)
        except BaseException:
            for _, answer in batch:
                _answer(answer, Stopped())
            raise
        self.state = transaction.state
        for event in stored:
            self._on_event(event, self.state)
        topics = {topic for event in stored for topic in _topics(event)}
        if any(isinstance(event, PeerBanned | PeerQuarantined) for event in stored):
            topics |= set(self._waiters)  # the waiting calls of an excluded peer must end
        for topic in topics:
            self._wake(topic)
        for (_, answer), outcome in zip(batch, outcomes, strict=True):
            _answer(answer, outcome)

    async def _append(self, events: Sequence[Event]) -> None:
        if self._store.blocks:
            await asyncio.to_thread(self._store.append, events)
        else:
            self._store.append(events)

    def _wake(self, topic: Topic) -> None:
        for woken in self._waiters.pop(topic, set()):
            if not woken.done():
                woken.set_result(None)


def _answer(answer: asyncio.Future[Outcome], what: Outcome | Stopped) -> None:
    if answer.done():  # the caller was cancelled
        return
    if isinstance(what, Stopped):
        answer.set_exception(what)
    else:
        answer.set_result(what)


def _topics(event: Event) -> tuple[Topic, ...]:
    """The topics whose waiting calls `event` may end."""
    match event:
        case GroupClosed():
            return (group_topic(event.stage, event.round_number),)
        case RoundCommitted() | RoundAborted():
            key = (event.decision.stage, event.decision.round_number)
            return (group_topic(*key), decision_topic(*key))
        case PlanAdopted() | RunFinished() | PeerBanned() | PeerQuarantined() | PeerUnbanned():
            return (RUN_TOPIC,)
        case AssignmentReserved() | PeerLost() | PeerLeft() | PeerRetreated() | AnchorDiverged():
            return (RUN_TOPIC,)  # the set of followers may have changed
        case _:
            return ()
