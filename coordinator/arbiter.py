"""Carries out arbitrations: asks the coordinator's own peer for contested payloads, and drops them later.

The state says which payloads are contested, so a coordinator that is started again goes on where it was.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple, Protocol

from coordinator.run.command_loop import ARBITER_TOPIC, RUN_TOPIC, CommandLoop, Stopped, decision_topic
from coordinator.run.rounds.arbitration import holdings_of
from coordinator.run.state.commands import Arbitrate
from coordinator.run.state.records import Round
from coordinator.run.state.state import State
from protocol.errors import HetnodeError
from protocol.status import RunPhase
from protocol.types import PayloadDescriptor, PeerId, Verdict

log = logging.getLogger(__name__)

_AT_ONCE = 96  # payloads that are fetched at the same time, of all stages; each occupies a thread of the host
_SERVED_ROUNDS = 2  # a payload is dropped when the round after the next one is decided


def donors_of(state: State, round_state: Round, owner: PeerId) -> list[PeerId]:
    """The live peers that can have the payload of `owner`: first the owner, then those that report it."""
    first = [owner] if state.peers[owner].is_live else []
    return list(dict.fromkeys((*first, *holdings_of(state, round_state).of(owner))))


class Arbiter(Protocol):
    """Fetches contested payloads, and serves those that are valid to the members of the run."""

    async def arbitrate(
        self, descriptor: PayloadDescriptor, donors: Sequence[PeerId], deadline: float
    ) -> Verdict:
        """Fetch the payload from any of `donors` within `deadline` seconds. Raises HetnodeError."""

    async def forget_payloads(self, before_round: int) -> None:
        """Drop the payloads of the rounds before `before_round`. Raises HetnodeError."""


class _Contested(NamedTuple):
    """Names a contested payload."""

    stage: int
    round_number: int
    owner: PeerId


async def arbitrate_contested(command_loop: CommandLoop, arbiter: Arbiter | None) -> None:
    """Get a verdict for each contested payload until the command loop has stopped.

    A payload without a verdict in time is decided by the reports alone. Without an arbiter none is contested.
    """
    if arbiter is None:
        return
    started: set[_Contested] = set()
    rounds: set[int] = set()
    # Each stage has its own part: payloads that no peer sends must not hold up those of other stages.
    stages = command_loop.state.stages
    at_once = [asyncio.Semaphore(max(1, _AT_ONCE // stages)) for _ in range(stages)]

    def fresh(state: State) -> list[_Contested] | None:
        return [each for each in _open_payloads(state) if each not in started] or None

    async with asyncio.TaskGroup() as group:
        with suppress(Stopped):
            while True:
                for payload in await command_loop.until(ARBITER_TOPIC, fresh):
                    started.add(payload)
                    group.create_task(_arbitrate(command_loop, arbiter, payload, at_once[payload.stage]))
                    if payload.round_number not in rounds:
                        rounds.add(payload.round_number)
                        group.create_task(_forget_later(command_loop, arbiter, payload.round_number))


def _open_payloads(state: State) -> list[_Contested]:
    return [
        _Contested(stage, round_number, owner)
        for (stage, round_number), round_state in state.rounds.items()
        if round_state.contest is not None and not state.is_decided(stage, round_number)
        for owner in round_state.contest.open_owners
    ]


async def _arbitrate(
    command_loop: CommandLoop, arbiter: Arbiter, payload: _Contested, at_once: asyncio.Semaphore
) -> None:
    state, (stage, round_number, owner) = command_loop.state, payload
    round_state = state.round_of(stage, round_number)
    descriptor, contest = round_state.offers[owner], round_state.contest
    assert contest is not None
    ends = max(contest.at, state.started_at) + contest.seconds
    try:
        async with asyncio.timeout(ends - command_loop.now()), at_once:
            remaining = ends - command_loop.now()
            donors = donors_of(state, round_state, owner)
            verdict = await arbiter.arbitrate(descriptor, donors, _before(remaining))
            with suppress(Stopped):
                await command_loop.execute(Arbitrate(stage, round_number, owner, verdict))
    except (HetnodeError, TimeoutError, RuntimeError) as error:  # RuntimeError: a bug in the child process
        log.warning("no verdict on the payload of %s: %s", owner, error or "no answer in time")


def _before(seconds: float) -> float:
    """A deadline that leaves time for the verdict to arrive."""
    return 0.9 * seconds


async def _forget_later(command_loop: CommandLoop, arbiter: Arbiter, round_number: int) -> None:
    """Drop the payloads of a round as soon as no peer can need them from here."""
    last = round_number + _SERVED_ROUNDS
    with suppress(Stopped):
        if last > command_loop.state.spec.rounds:
            await command_loop.until(RUN_TOPIC, _is_finished)
        else:
            for stage in range(command_loop.state.stages):
                await command_loop.until(decision_topic(stage, last), partial(_is_decided, (stage, last)))
        try:
            await arbiter.forget_payloads(round_number + 1)
        except (HetnodeError, RuntimeError) as error:
            log.warning("contested payloads of round %d stay on the disk: %s", round_number, error)


def _is_finished(state: State) -> bool | None:
    return True if state.phase is RunPhase.FINISHED else None


def _is_decided(key: tuple[int, int], state: State) -> bool | None:
    return True if state.is_decided(*key) else None
