"""The owner of the coordinator's state, and time that does not pass as it should."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from coordinator.ledger import STALL_SECONDS, Ledger
from coordinator.state import State
from coordinator.store import MemoryStore
from protocol.types import Role
from tests.swarm import keyed, spec_of

SPEC = spec_of(replicas=2)


class _Jumping(Ledger):
    """A ledger whose clock the test can move on, as for a machine that was suspended."""

    ahead = 0.0

    def now(self) -> float:
        return super().now() + self.ahead


@pytest.fixture
async def ledger() -> AsyncIterator[_Jumping]:
    ledger = _Jumping(SPEC, MemoryStore(), State(stages=SPEC.swarm.stages), lambda *_: None, lambda _: None)
    serving = asyncio.create_task(ledger.run())
    await ledger.execute(keyed(1).join(SPEC, Role.REPLICA))
    yield ledger
    ledger.stop()
    await serving


async def test_a_coordinator_that_did_not_run_declares_nobody_lost(ledger: _Jumping) -> None:
    ledger.ahead = 10 * SPEC.timing.lost_after
    await ledger.tick()
    assert ledger.state.peers[keyed(1).peer].is_live


async def test_a_peer_that_stays_silent_while_the_coordinator_runs_is_lost(ledger: _Jumping) -> None:
    while ledger.ahead < SPEC.timing.lost_after + STALL_SECONDS:
        ledger.ahead += STALL_SECONDS / 2
        await ledger.tick()
    assert not ledger.state.peers[keyed(1).peer].is_live
