"""The one owner of the state: commands come in, events are stored, the state moves, the waiting are woken.

Commands are taken in order of arrival. Those that arrive while the store writes are decided together and
stored in one transaction, so a thousand peers cost a few writes, not a thousand.
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
"""Ticks come several times a second; so long a gap means that this process did not run."""
T = TypeVar("T")

Topic = tuple[str, int, int]
"""What a waiter waits for: a group or a decision of (stage, round), or the news of the run."""

NEWS: Topic = ("news", 0, 0)


def group_topic(stage: int, round_number: int) -> Topic:
    return ("group", stage, round_number)


def decision_topic(stage: int, round_number: int) -> Topic:
    return ("decision", stage, round_number)


def steady_wall_clock(not_before: float = 0.0) -> Callable[[], float]:
    """The wall clock as it is now, running steadily from here on.

    Stored times must go on across restarts, but must not jump when somebody sets the clock.

    Args:
        not_before: the time of the newest stored event: a clock that was set back since must not make
            deadlines wait for as long.
    """
    offset = max(time.time(), not_before) - time.monotonic()
    return lambda: offset + time.monotonic()


class Stopped(Exception):
    """The coordinator is going away; whoever waits should ask its successor."""


class CommandLoop:
    """The state of one run, in front of its store.

    Args:
        state: as replayed from `store`.
        on_event: told each event after it was stored, with the state that all of its batch led to.
        on_sentence: told the run's sentence whenever a tick finds it changed.
        clock: the time of events in seconds, never decreasing; None takes :func:`steady_wall_clock`.
    """

    def __init__(
        self,
        spec: RunSpec,
        store: Store,
        state: State,
        on_event: Callable[[Event, State], None],
        on_sentence: Callable[[str], None],
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.spec = spec
        self.state = state
        self._store = store
        self._on_event = on_event
        self._on_sentence = on_sentence
        self._commands: asyncio.Queue[tuple[Command, asyncio.Future[Outcome]] | None] = asyncio.Queue()
        self._waiters: defaultdict[Topic, set[asyncio.Future[None]]] = defaultdict(set)
        self._stopping = False
        self._sentence = ""
        self._waiting = ""
        self._clock = clock or steady_wall_clock(state.latest_at)
        self._ticked_at = self.now()

    def now(self) -> float:
        """Seconds on the clock of the events."""
        return self._clock()

    async def run(self) -> None:
        """Serve commands until :meth:`stop`. Where the store fails, raise its error and serve no more."""
        try:
            while (first := await self._commands.get()) is not None:
                await self._serve([first, *self._arrived()])
        finally:
            self.stop()
            for _, answer in self._arrived():
                _answer(answer, Stopped())

    async def execute(self, command: Command) -> None:
        """Decide `command` and return once its events are stored and applied.

        A caller that is cancelled meanwhile does not undo it.

        Raises:
            HetnodeError: the refusal.
            Stopped: the ledger no longer serves.
        """
        if self._stopping:
            raise Stopped
        answer: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._commands.put_nowait((command, answer))
        refusal = (await answer).refusal
        if refusal is not None:
            raise refusal

    async def tick(self) -> None:
        """Let time pass, and tell what the run now does or waits for if that is new.

        Where this process itself did not run for a while (a suspended or overloaded machine), peers had no
        chance to be heard: that is treated as a restart, after which silence counts from now.
        """
        if self.now() - self._ticked_at > STALL_SECONDS:
            await self.execute(Start())
        await self.execute(Tick())
        self._ticked_at = self.now()
        text = run_message(self.state, self.spec)
        if text != self._sentence:
            self._sentence = text
            self._on_sentence(text)
        waits = stall_message(self.state, self.spec)
        if waits != self._waiting:
            self._waiting = waits
            self._wake(NEWS)

    async def until(self, topic: Topic, ready: Callable[[State], T | None]) -> T:
        """What `ready` makes of the state, as soon as that is not None; asked again on every `topic`.

        Raises:
            Stopped: the ledger stops first.
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
        """Wake everybody who waits, and let :meth:`run` return after the commands that it has."""
        if not self._stopping:
            self._stopping = True
            self._commands.put_nowait(None)
            for topic in list(self._waiters):
                self._wake(topic)

    def _arrived(self) -> list[tuple[Command, asyncio.Future[Outcome]]]:
        """The commands that wait now, without the mark of the end."""
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
            topics |= set(self._waiters)  # a banned peer waits for nothing any more
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
    """Unless its caller has gone."""
    if answer.done():
        return
    if isinstance(what, Stopped):
        answer.set_exception(what)
    else:
        answer.set_result(what)


def _topics(event: Event) -> tuple[Topic, ...]:
    """What an event is news for."""
    match event:
        case GroupClosed():
            return (group_topic(event.stage, event.round_number),)
        case RoundCommitted() | RoundAborted():
            key = (event.decision.stage, event.decision.round_number)
            return (group_topic(*key), decision_topic(*key))
        case PlanAdopted() | RunFinished() | PeerBanned() | PeerQuarantined() | PeerUnbanned():
            return (NEWS,)
        case AssignmentReserved() | PeerLost() | PeerLeft() | PeerRetreated() | AnchorDiverged():
            return (NEWS,)  # who follows has changed
        case _:
            return ()
