"""Real event logs of whole swarms: the answers name what was done to the swarm."""

from __future__ import annotations

import asyncio

from coordinator.run.state.events import PayloadOffered, PayloadWithheld, PeerLost
from coordinator.run.state.state import State
from coordinator.run.state.text import short
from protocol.types import PeerId, Role
from tests.support.explaining import Asked, text_of
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
    text = text_of(found)
    assert "more than usual went into waiting for the payloads of the other replicas" in text
    assert f"({short(peer)}) had trained too little of its inner phase to offer a payload" in text
    withheld = ask.cited(found, "had trained too little")
    assert {(type(each), each.peer) for each in withheld} == {(PayloadWithheld, peer)}  # type: ignore[attr-defined]


def test_a_slow_device_is_always_the_last(play: Play) -> None:
    async def scenario(swarm: VirtualSwarm) -> tuple[Asked, PeerId]:
        swarm.nodes["b"].speed = 0.6
        swarm.start()
        await swarm.until_round(6)
        return asked(swarm), swarm.peer("b")

    ask, peer = play(scenario, FULL, swarm_spec(FULL, rounds=60), step_seconds=3.0)
    text = text_of(ask(5))
    replica = ask.state.plan_for(5).replica_of(peer)
    assert replica is not None
    assert f"{replica.name} was last: it offered" in text
    assert f"{short(peer)} computes at" in text
    assert "It is always slower than the others" in text


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
    found = ask(number)
    text = text_of(found)
    assert f"{short(lost.peer)} is lost: silent for" in text  # type: ignore[arg-type]
    assert "is gone" in ask(peer).title
    assert lost in ask.cited(ask(peer), "is lost")


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
    text = text_of(found)
    assert "does not train" in found.title
    assert "It follows the rounds of stage" in text
    assert "has no peer for stage" in text


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
    assert f"{pipeline.name} was last: it offered" in text_of(found)
    offers = ask.cited(found, "was last")
    assert {each.descriptor.round_number for each in offers if isinstance(each, PayloadOffered)} == {3}
    assert "Prediction of the cost model: a round takes" in text_of(ask("now"))
