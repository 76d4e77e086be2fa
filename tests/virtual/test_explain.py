"""Real event logs of whole swarms: the answers name what was done to the swarm."""

from __future__ import annotations

import asyncio

from coordinator.ops.explain.statements import Code
from coordinator.run.state.events import PayloadOffered, PayloadWithheld, PeerLost
from coordinator.run.state.state import State
from protocol.status import CauseCode
from protocol.types import PeerId, Role
from tests.support.coordinator_run import codes_of
from tests.support.explaining import Asked, said
from tests.virtual.scenario import FULL, MIXED, Play, swarm_spec
from tests.virtual.swarm import VirtualSwarm


def asked(swarm: VirtualSwarm, state: State | None = None) -> Asked:
    return Asked(state or swarm.state, swarm.events, swarm.loop.time())


def test_a_machine_that_stands_still_for_a_while_is_why_its_round_is_slow(play: Play) -> None:
    async def scenario(swarm: VirtualSwarm) -> tuple[Asked, int, PeerId]:
        swarm.start()
        await swarm.until_round(4)
        swarm.suspend("b", 6.0)
        number = swarm.state.current_round
        await swarm.until_round(number + 1)
        return asked(swarm), number, swarm.peer("b")

    ask, number, peer = play(scenario, FULL, swarm_spec(FULL, rounds=60), step_seconds=3.0)
    found = ask(number)
    assert said(found, Code.MORE_TIME, detail="offer")
    (withheld,) = said(found, Code.WITHHELD, peers=(peer,))
    assert {type(each) for each in ask.cited(withheld)} == {PayloadWithheld}


def test_a_slow_device_is_always_the_last(play: Play) -> None:
    async def scenario(swarm: VirtualSwarm) -> tuple[Asked, PeerId]:
        swarm.nodes["b"].speed = 0.6
        swarm.start()
        await swarm.until_round(6)
        return asked(swarm), swarm.peer("b")

    ask, peer = play(scenario, FULL, swarm_spec(FULL, rounds=60), step_seconds=3.0)
    found, replica = ask(5), ask.state.plan_for(5).replica_of(peer)
    assert replica is not None
    assert [each.replicas[0] for each in said(found, Code.LAST)] == [replica.index]
    assert said(found, Code.FLOPS, peers=(peer,))
    assert said(found, Code.ALWAYS_SLOW, replicas=(replica.index,))


def test_a_member_that_is_killed_is_named_as_lost(play: Play) -> None:
    async def scenario(swarm: VirtualSwarm) -> tuple[Asked, int, PeerId]:
        swarm.start()
        await swarm.until_round(3)
        swarm.kill("b")
        await swarm.until(lambda state: not state.peers[swarm.peer("b")].is_live)
        number = swarm.state.current_round
        await swarm.until_round(number + 1)
        return asked(swarm), number, swarm.peer("b")

    ask, number, peer = play(scenario, FULL, swarm_spec(FULL, rounds=60))
    lost = next(each for each in ask.log if isinstance(each, PeerLost))
    (silent,) = said(ask(number), Code.NO_OFFER, peers=(peer,))
    assert lost in ask.cited(silent)
    about = ask(peer)
    assert about.title.detail == "gone"
    assert lost in [event for each in said(about, Code.EVENT) for event in ask.cited(each)]


def test_a_spare_without_memory_and_a_follower_are_told_why_they_wait(play: Play) -> None:
    members = {**MIXED, "s": Role.STAGE}

    async def scenario(swarm: VirtualSwarm) -> tuple[Asked, PeerId]:
        swarm.start("a", "b", "p", "q")
        await swarm.until_round(2)
        swarm.start("s")
        await swarm.until(lambda state: swarm.peer("s") in state.peers)
        await asyncio.sleep(1)
        return asked(swarm), swarm.peer("s")

    ask, peer = play(scenario, members, swarm_spec(MIXED, rounds=60))
    found = ask(peer)
    assert found.title.detail == "follows"
    assert [codes_of(each.cause) for each in said(found, Code.CAUSE)] == [
        [CauseCode.FOLLOWS, CauseCode.OBSTRUCTED, CauseCode.VACANT]
    ]


def test_a_slow_line_makes_its_pipeline_the_last(play: Play) -> None:
    async def scenario(swarm: VirtualSwarm) -> Asked:
        swarm.network.bandwidth["p"] = 2_000.0
        swarm.start()
        await swarm.until_round(4)
        return asked(swarm)

    # The pipeline has time for its whole inner phase.
    ask = play(scenario, MIXED, swarm_spec(MIXED, rounds=60, **{"timing.straggler": 10.0}))
    found = ask(3)
    pipeline = next(each for each in ask.state.plans[-1].replicas if len(each.members) > 1)
    (last,) = said(found, Code.LAST)
    assert last.replicas[0] == pipeline.index
    offers = ask.cited(last)
    assert {each.descriptor.round_number for each in offers if isinstance(each, PayloadOffered)} == {3}
    assert said(ask("now"), Code.PREDICTION)
