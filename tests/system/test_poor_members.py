"""Members that cost the others time, on a virtual clock: late frames, rare answers, a place without use."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from coordinator.run.state.events import LinkFailed, PeerRetreated, RoundDecided
from coordinator.run.state.state import APART_ROUNDS
from node.core.train.node_loop import End, NodeLoop
from node.net.coordinator_client import CoordinatorClient
from node.net.link import Frame, LiveLink
from protocol.types import ExchangeGroup, PayloadDescriptor, Role
from tests.virtual.network import current_machine
from tests.virtual.scenario import Play, contributions, swarm_spec
from tests.virtual.swarm import VirtualSwarm

LATE_SECONDS = 25.0
FOUR = dict.fromkeys("abcd", Role.REPLICA)


def test_a_pipeline_whose_frames_are_late_is_parted_and_the_others_go_on(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = LiveLink.send

    async def send_late(self: LiveLink, frame: Frame, deadline: float) -> None:
        if current_machine() == "q":
            await asyncio.sleep(LATE_SECONDS)
        await send(self, frame, deadline)

    monkeypatch.setattr(LiveLink, "send", send_late)
    members = {"a": Role.REPLICA, "p": Role.STAGE, "q": Role.STAGE}
    swarm = play.to_the_end(members=members, rounds=30, **{"inner.steps": 4})
    parted = [each for each in swarm.happened(LinkFailed) if each.since is not None]
    assert {frozenset((each.peer, each.neighbour)) for each in parted} == {
        frozenset((swarm.peer("p"), swarm.peer("q")))
    }
    # Without the half of the weight that never comes, what the others train counts.
    assert not contributions(swarm, "q")
    first = contributions(swarm, "a")[0]
    assert contributions(swarm, "a")[:APART_ROUNDS] == [*range(first, first + APART_ROUNDS)]


def test_a_replica_that_answers_one_round_in_three_is_dropped(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    match = CoordinatorClient.match

    async def match_rarely(
        self: CoordinatorClient, descriptor: PayloadDescriptor, deadline: float
    ) -> ExchangeGroup:
        if current_machine() == "d" and descriptor.round_number % 3:
            await self.await_decision(descriptor.stage, descriptor.round_number, 1000.0)
        return await match(self, descriptor, deadline)

    monkeypatch.setattr(CoordinatorClient, "match", match_rarely)
    swarm = play.to_the_end(members=FOUR, rounds=20)
    reasons = [each.reason for each in swarm.happened(PeerRetreated) if each.peer == swarm.peer("d")]
    assert any("of its last 16 rounds" in each for each in reasons)
    assert {each for each in contributions(swarm, "d") if each % 3} == set()
    assert contributions(swarm, "a") == [*swarm.rounds]
    taken = [each for each in swarm.events if isinstance(each, RoundDecided)]
    assert len(taken) == 2 * 20


def test_an_idle_member_keeps_no_place_from_those_that_train(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = NodeLoop.run

    async def run_or_idle(self: NodeLoop) -> End:
        if current_machine() == "idle":
            await asyncio.Event().wait()
        return await loop(self)

    monkeypatch.setattr(NodeLoop, "run", run_or_idle)
    timing: dict[str, Any] = {"timing.link": 20.0, "timing.match_window": 10.0}
    members = {"a": Role.REPLICA, "b": Role.REPLICA}
    newcomers = {"idle": Role.STAGE, "p": Role.STAGE, "q": Role.STAGE}

    async def later(swarm: VirtualSwarm) -> None:
        await swarm.until_round(2)
        for name in newcomers:
            swarm.start(name)
            await asyncio.sleep(5)

    swarm = play.to_the_end(
        later, members, later=newcomers, ending=("a", "b", "p", "q"), spec=swarm_spec(members, 15, **timing)
    )
    assert not contributions(swarm, "idle")
    assert contributions(swarm, "p") == contributions(swarm, "q")
    assert contributions(swarm, "p")[-1] == 15
