"""Swarms with dense rounds and with random positions: all anchors agree, nothing learned is lost."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.state.events import PayloadArbitrated
from node.model.payloads import payload_layout
from protocol.types import Finding, Role
from tests.support.fault_script import Action, Moment
from tests.support.faults import FaultPlan
from tests.support.overlap import Records, assert_balanced
from tests.virtual.scenario import (
    FULL,
    MIXED,
    TWO,
    Play,
    contributions,
    deny_payloads,
    return_after,
    swarm_spec,
)
from tests.virtual.swarm import VirtualSwarm

DENSE = {"outer.dense_every": 3}
RANDOM = {"outer.selection": "random", "outer.top_k": 144}
OPTIONS: list[dict[str, Any]] = [DENSE, RANDOM, {**RANDOM, **DENSE, "outer.dense_quantizer": "1bit"}]


def assert_forms(swarm: VirtualSwarm) -> None:
    """Every committed payload has the codec and the length of its round."""
    for decision in swarm.decisions:
        layout = payload_layout(swarm.spec, decision.stage, decision.round_number)
        found = {(entry.descriptor.codec, entry.descriptor.nbytes) for entry in decision.entries}
        assert found <= {(layout.codec, layout.nbytes)}


@pytest.mark.parametrize("options", [*OPTIONS, {**DENSE, "outer.overlap": 1}], ids=str)
def test_full_and_pipeline_replicas_contribute_to_all_rounds_and_agree(
    play: Play, options: dict[str, Any]
) -> None:
    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        await swarm.until_over()
        swarm.assert_all_agree()
        rounds = list(range(1, swarm.spec.rounds + 1))
        assert swarm.committed(0) == swarm.committed(1) == rounds
        assert all(contributions(swarm, name) == rounds for name in MIXED)
        assert_forms(swarm)
        embeddings = {swarm.trainer(name).outer.embedding_digest() for name in MIXED}
        assert len(embeddings) == 1, "members without stage 0 follow it"

    play(scenario, MIXED, swarm_spec(MIXED, rounds=4, **options))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_who_is_killed_or_comes_late_follows_dense_rounds(
    play: Play, plan: FaultPlan, options: dict[str, Any]
) -> None:
    plan.fail_at("b", 0, 3, Moment.DECIDED, Action.KILL)
    members = {**FULL, "late": Role.REPLICA}

    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start(*FULL)
        await return_after(swarm, "b", 5)  # from its checkpoint after round 2, then by replay of round 3
        await swarm.until_round(6)
        swarm.start("late")
        await swarm.until_over()
        swarm.assert_all_agree()
        assert_forms(swarm)
        assert contributions(swarm, "b")[-1] == contributions(swarm, "late")[-1] == 10

    play(scenario, members, swarm_spec(FULL, rounds=10, **options))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_an_aborted_dense_round_loses_nothing(
    play: Play, plan: FaultPlan, records: Records, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    deny_payloads(plan, monkeypatch, stage=1, round_number=3)

    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        await swarm.until_over()
        swarm.assert_all_agree()
        assert (swarm.committed(0), swarm.committed(1)) == ([1, 2, 3, 4, 5, 6], [1, 2, 4, 5, 6])
        assert_forms(swarm)
        assert_balanced(swarm, records, *FULL)

    play(scenario, FULL, swarm_spec(FULL, **{"outer.error_decay": 1.0}, **options))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_arbiter_knows_the_form_of_each_round(
    play: Play, plan: FaultPlan, options: dict[str, Any]
) -> None:
    plan.fail_at("b", None, None, Moment.GATHERED, Action.DENY, times=1000)

    async def scenario(swarm: VirtualSwarm) -> None:
        swarm.start()
        await swarm.until_over()
        swarm.assert_all_agree()
        assert swarm.committed(0) == swarm.committed(1) == [1, 2, 3, 4]
        verdicts = [event.verdict for event in swarm.events if isinstance(event, PayloadArbitrated)]
        assert {verdict.finding for verdict in verdicts} == {Finding.HELD}

    play(scenario, TWO, swarm_spec(TWO, rounds=4, **options))
