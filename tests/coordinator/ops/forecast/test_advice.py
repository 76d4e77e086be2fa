"""Which settings of the exchange would make a round shorter."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from coordinator.ops.forecast.advice import advice
from coordinator.ops.forecast.forecast import forecast
from coordinator.placement.cost_model import Survey
from coordinator.placement.rules import links_between
from protocol.run_files.resolve import resolve
from protocol.spec.run import RunSpec
from protocol.types import Capacity, Member, PeerId, Replica, StageRange

PAYLOADS = (3_000_000, 2_000_000)


def spec_with(**overrides: object) -> RunSpec:
    return resolve("178m", overrides={"swarm.stages": 2, "inner.steps": 5, **overrides})


def named(spec: RunSpec, replicas: Sequence[Replica], uplink: float) -> list[tuple[str, float]]:
    able = Capacity("", 2**40, 1, 1e13, uplink, uplink, 0.0)
    survey = Survey({member.peer: able for each in replicas for member in each.members})
    base = forecast(spec, survey, replicas, PAYLOADS)
    found = list(advice(spec, survey, replicas, PAYLOADS, base))
    for each in found:
        assert each.gain == pytest.approx(1 - each.round_seconds / base.round_seconds)
    return [(each.setting, each.gain) for each in found]


def pipelines(count: int) -> list[Replica]:
    found = []
    for index in range(count):
        members = tuple(
            Member(PeerId(f"{index}-{stage}"), StageRange(stage, stage + 1), "here") for stage in (0, 1)
        )
        found.append(Replica(index, members, links_between(members, 64)))
    return found


def full(count: int) -> list[Replica]:
    return [
        Replica(index, (Member(PeerId(f"{index}"), StageRange(0, 2), "here"),), ()) for index in range(count)
    ]


def test_many_pipelines_on_slow_lines_gain_by_snapshots_and_more_by_reduction() -> None:
    (snapshots, some), (reduction, more) = named(spec_with(), pipelines(40), 1e6)
    assert snapshots.startswith("link.embedding_every = ")
    assert reduction == 'outer.exchange = "reduced"'
    assert 0.02 < some < more < 1


def test_reduction_of_radial_updates_needs_their_mean() -> None:
    ((setting, _),) = named(spec_with(**{"outer.merge": "radial"}), full(40), 1e6)
    assert setting == 'outer.exchange = "reduced", outer.merge = "mean"'


def test_reduction_is_not_named_where_it_is_not_possible() -> None:
    turns = {"outer.turns": 2, "outer.overlap": 1}
    assert [setting for setting, _ in named(spec_with(**turns), full(40), 1e6)] == []


def test_without_members_that_lack_stage_0_no_snapshot_is_named() -> None:
    assert [setting for setting, _ in named(spec_with(), full(40), 1e6)] == ['outer.exchange = "reduced"']


def test_what_gains_little_or_is_set_already_is_not_named() -> None:
    assert named(spec_with(), pipelines(40), 1e12) == []
    assert named(spec_with(), full(2), 1e6) == [], "two gather with fewer bytes than they reduce"
    set_already = spec_with(**{"link.embedding_every": 5, "outer.exchange": "reduced"})
    assert named(set_already, pipelines(40), 1e6) == []
    assert [
        setting for setting, _ in named(spec_with(**{"link.embedding_every": 5}), pipelines(40), 1e6)
    ] == ['outer.exchange = "reduced"']
