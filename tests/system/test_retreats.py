"""Replicas that retreat in a round, and come back with a later plan."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from coordinator.run.state.events import PayloadWithheld, PeerRetreated
from protocol.errors import ErrorCode, HetnodeError
from protocol.types import Role
from tests.virtual.network import current_machine
from tests.virtual.scenario import FULL, MIXED, PIPE, Play, contributions
from tests.virtual.swarm import VirtualSwarm
from tests.virtual.transport import VirtualTransport


def retreats(swarm: VirtualSwarm) -> list[tuple[str, int]]:
    """The nodes that have retreated, each with the epoch of the plan that it had."""
    names = {swarm.peer(name): name for name in swarm.nodes}
    return sorted((names[event.peer], event.epoch) for event in swarm.happened(PeerRetreated))


@pytest.mark.parametrize("members", [PIPE, MIXED], ids=["alone", "beside others"])
def test_a_replica_whose_link_breaks_while_the_coordinator_is_away_retreats_later(
    play: Play, members: Mapping[str, Role]
) -> None:
    async def broken(swarm: VirtualSwarm) -> None:
        await swarm.until_round(2)
        await asyncio.sleep(0.6)
        swarm.coordinator.kill()
        swarm.network.reset("p", "q")
        await asyncio.sleep(60)
        await swarm.coordinator.start()

    swarm = play.to_the_end(broken, members)
    assert {epoch for _, epoch in retreats(swarm)} == {1}
    assert contributions(swarm, "p")[-1] == contributions(swarm, "q")[-1] == 6


def test_a_full_replica_that_lacks_one_payload_retreats_and_gets_another_assignment(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch, failed = VirtualTransport.fetch_payload, []

    async def fail_once(self: VirtualTransport, *args: Any) -> Any:
        if current_machine() == "c" and not failed:
            failed.append(True)
            raise HetnodeError(ErrorCode.PAYLOAD_UNAVAILABLE, "No peer holds it.", "A test.")
        return await fetch(self, *args)

    monkeypatch.setattr(VirtualTransport, "fetch_payload", fail_once)
    swarm = play.to_the_end()
    assert retreats(swarm) == [("c", 1)]
    assert not swarm.happened(PayloadWithheld)
    assert all(contributions(swarm, name)[-2:] == [5, 6] for name in FULL)


def test_a_retreat_names_the_newest_plan_that_kept_the_replica(play: Play) -> None:
    async def lost_then_broken(swarm: VirtualSwarm) -> None:
        await swarm.until_round(2)
        swarm.kill("b")
        await swarm.until(lambda state: len(state.plans) == 2 and state.current_round >= 3)
        await asyncio.sleep(1.6)
        assert len(swarm.state.plans[1].replicas) == 2
        swarm.network.reset("p", "q")

    swarm = play.to_the_end(lost_then_broken, MIXED, rounds=7, ending="apq")
    assert retreats(swarm) == [("p", 2), ("q", 2)]
    assert not swarm.happened(PayloadWithheld)
    assert contributions(swarm, "p")[-1] == contributions(swarm, "q")[-1] == 7
