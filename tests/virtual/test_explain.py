"""Real event logs of whole swarms: the answers name what was done to the swarm."""

from __future__ import annotations

import asyncio

import torch

from coordinator.ops.explain.statements import Code
from coordinator.run.state.events import PayloadOffered, PayloadWithheld
from coordinator.run.state.state import State
from coordinator.store.metrics import read_measurements
from protocol.status import Measurement
from protocol.types import PeerId
from tests.support.explaining import Asked, said
from tests.virtual.scenario import FULL, MIXED, SPARSE, Play, swarm_spec
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


def test_a_member_whose_values_are_not_finite_is_named_with_the_step(play: Play) -> None:
    async def scenario(swarm: VirtualSwarm) -> tuple[Asked, int, PeerId, list[Measurement]]:
        swarm.start()
        await swarm.until_round(3)
        await asyncio.sleep(4.0)  # on the virtual clock: into the inner phase, past the commits before it
        number, trainer = swarm.state.current_round, swarm.trainer("q")
        with torch.no_grad():
            next(iter(trainer.parameters(trainer.stages.first).values())).fill_(torch.nan)
        await swarm.until_round(number + 2)
        file = swarm.folder / "coordinator" / "metrics.jsonl"
        measured = [each for _, each, _ in read_measurements(file, 0, file.stat().st_size)]
        return asked(swarm), number, swarm.peer("q"), measured

    ask, number, peer, measured = play(scenario, MIXED, swarm_spec(MIXED, rounds=60), step_seconds=3.0)
    (told,) = (each for asks in (number, number + 1) for each in said(ask(asks, measured), Code.NONFINITE))
    assert told.peers == (peer,)
    assert told.figures["step"] >= 1


def test_a_slow_line_makes_its_pipeline_the_last(play: Play) -> None:
    async def scenario(swarm: VirtualSwarm) -> Asked:
        swarm.network.bandwidth["p"] = 2_000.0
        swarm.start()
        await swarm.until_round(4)
        return asked(swarm)

    # The pipeline has time for its whole inner phase.
    ask = play(scenario, MIXED, swarm_spec(MIXED, rounds=60, **SPARSE, **{"timing.straggler": 10.0}))
    found = ask(3)
    pipeline = next(each for each in ask.state.plans[-1].replicas if len(each.members) > 1)
    (last,) = said(found, Code.LAST)
    assert last.replicas[0] == pipeline.index
    offers = ask.cited(last)
    assert {each.descriptor.round_number for each in offers if isinstance(each, PayloadOffered)} == {3}
    assert said(ask("now"), Code.PREDICTION)
