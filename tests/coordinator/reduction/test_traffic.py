"""The forecast of a reduction agrees with what the members of a group account for."""

from __future__ import annotations

import pytest

from coordinator.ops.forecast.exchange_traffic import embedding_traffic, payload_traffic
from coordinator.placement.cost_model import Survey
from coordinator.reduction.traffic import result_ratio
from node.core.model.shapes import parameter_shapes
from node.exchange.hive.reduction.part_plan import PartPlan
from protocol.reduction.parts import ReductionLayout
from protocol.run_files.resolve import resolve
from protocol.types import Capacity, ExchangeGroup, Member, MemberLine, Replica, StageRange
from tests.builders import keyed

SPEC = resolve(
    "tiny",
    overrides={"swarm.stages": 1, "outer.exchange": "reduced", "swarm.pipelines": 0, "swarm.replicas": 4},
)
LAYOUT = ReductionLayout(parameter_shapes(SPEC, 0), SPEC.outer)
NBYTES = LAYOUT.payload.nbytes


@pytest.mark.parametrize(
    ("uplinks", "endpoints"),
    [
        ((1, 1, 1, 1), "oooo"),
        ((4, 2, 1, 1), "oooo"),
        ((8, 1, 1, 1), "o--o"),
        ((8, 8, 1, 1), "o---"),
    ],
)
def test_a_reduction_takes_the_bytes_that_its_members_account_for(
    uplinks: tuple[int, ...], endpoints: str
) -> None:
    peers = sorted((keyed(number) for number in range(4)), key=lambda each: each.peer)
    rates = [2.0**20 * each for each in uplinks]
    is_open = [each == "o" for each in endpoints]
    lines = tuple(
        MemberLine(round(rate), round(rate), each) for rate, each in zip(rates, is_open, strict=True)
    )
    group = ExchangeGroup("g", tuple(each.payload(SPEC, 0, 1) for each in peers), 1.0, lines)
    plan = PartPlan.of_group(LAYOUT, group)
    replicas = [
        Replica(index, (Member(each.peer, StageRange(0, 1), "here" if is_open[index] else ""),), ())
        for index, each in enumerate(peers)
    ]
    survey = Survey(
        {each.peer: Capacity("", 1, 1, 1.0, rate, rate, 0.0) for each, rate in zip(peers, rates, strict=True)}
    )
    found = payload_traffic(SPEC, survey, replicas, [NBYTES])
    for position, each in enumerate(peers):
        sent, received = plan.traffic(position)
        assert found[each.peer].sent == pytest.approx(sent, rel=0.1, abs=0.1 * NBYTES)
        assert found[each.peer].received == pytest.approx(received, rel=0.1, abs=0.1 * NBYTES)


def test_the_ratio_of_a_result_to_a_payload_is_that_of_the_codec() -> None:
    assert result_ratio(SPEC.outer) == pytest.approx(LAYOUT.result.nbytes / NBYTES, rel=0.1)


def test_members_without_stage_0_fetch_one_result_however_many_replicas_there_are() -> None:
    spec = resolve("nano", overrides={"swarm.stages": 2, "outer.exchange": "reduced"})
    names = [keyed(number).peer for number in range(6)]
    replicas = [
        Replica(
            index,
            tuple(Member(names[2 * index + stage], StageRange(stage, stage + 1), "") for stage in (0, 1)),
            (),
        )
        for index in range(3)
    ]
    survey = Survey({each: Capacity("", 1, 1, 1.0, 1.0, 1.0, 0.0) for each in names})
    few, many = (embedding_traffic(spec, survey, replicas[:count], 100) for count in (2, 3))
    assert few[names[1]] == many[names[1]]
    assert few[names[1]].received == pytest.approx(100 * result_ratio(spec.outer))
    assert sum(each.sent for each in many.values()) == sum(each.received for each in many.values())
