"""The weight of compressed replicas follows from cosines of pairs, in bounds and steps; no liar sets it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.algorithm.batch import work_of
from protocol.algorithm.compressed_weight import (
    LEAST_WEIGHT,
    STEP,
    PairCosine,
    is_compressed,
    next_weight,
    relative_agreement,
    weighed,
)
from protocol.types import Dialer, Link, Member, PeerId, Replica, StageRange
from tests.builders import spec_of

WEIGHTS = st.sampled_from([STEP * number for number in range(2, 9)])


def cosines(values: Sequence[float], stage: int = 0, kind: str = "full", rounds: int = 5) -> list[PairCosine]:
    """Of owners whose payloads have these cosines in each round."""
    owners = [(PeerId(f"{kind}-{number}"), value) for number, value in enumerate(values)]
    return [PairCosine(stage, owner, value) for owner, value in owners for _ in range(rounds)]


def agreement(full: Sequence[float], compressed: Sequence[float]) -> float | None:
    return relative_agreement(cosines(full), cosines(compressed, kind="compressed"))


def replica(index: int, *ks: int, weight: float = 1.0, microbatches: int = 0) -> Replica:
    members = tuple(
        Member(PeerId(f"{index}-{stage}"), StageRange(stage, stage + 1), "") for stage in range(len(ks) + 1)
    )
    return Replica(
        index, members, tuple(Link(k, Dialer.UPSTREAM) for k in ks), weight=weight, microbatches=microbatches
    )


def test_the_agreement_is_relative_to_that_of_full_payloads() -> None:
    assert agreement([0.2, 0.2, 0.2], [0.1, 0.1, 0.1]) == pytest.approx(0.5)


def test_without_two_full_replicas_or_a_compressed_one_it_is_not_told() -> None:
    assert agreement([], [0.1]) is None
    assert agreement([0.2], []) is None
    assert agreement([], []) is None
    assert agreement([0.005, 0.005], [0.001, 0.001]) is None, "noise"


def test_an_owner_that_was_measured_in_few_rounds_does_not_count() -> None:
    newcomer = cosines([-0.5], kind="new", rounds=2)
    honest = cosines([0.1, 0.1], kind="compressed")
    assert relative_agreement([*cosines([0.2, 0.2]), *newcomer], honest) == pytest.approx(0.5)
    assert relative_agreement(cosines([0.2, 0.2]), newcomer) is None


def test_half_of_the_stages_must_tell_it_and_the_higher_median_of_them_counts() -> None:
    full = [each for stage in range(4) for each in cosines([0.2, 0.2], stage)]
    of_stage = {0: 0.02, 1: 0.04, 2: 0.1, 3: 0.16}
    found = [each for stage, value in of_stage.items() for each in cosines([value] * 2, stage, "compressed")]
    assert relative_agreement(full, found) == pytest.approx(0.5)
    assert relative_agreement(full, [each for each in found if each.stage < 2]) == pytest.approx(0.2)
    assert relative_agreement(full, [each for each in found if each.stage < 1]) is None


@given(
    st.integers(2, 9),
    st.floats(-1, 1),
    st.lists(st.floats(-1, 1), min_size=1, max_size=5),
    st.booleans(),
)
def test_one_liar_never_lowers_the_agreement_below_that_of_honest_ones(
    count: int, lie: float, lies: list[float], of_full: bool
) -> None:
    honest = [0.2 + 0.001 * number for number in range(count)]
    full, compressed = cosines(honest[:]), cosines([each / 2 for each in honest], kind="compressed")
    least = min(each / 2 for each in honest) / max(honest)
    liars = full if of_full else compressed
    kept = [each for each in liars if not each.owner.endswith("-0")]
    lied = [*kept, *(PairCosine(0, liars[0].owner, each) for each in [lie, *lies])]
    found = relative_agreement(*((lied, compressed) if of_full else (full, lied)))
    assert found is None or found >= least * (1 - 1e-12)


@given(WEIGHTS, st.floats(-2, 3))
def test_a_weight_is_in_its_bounds_and_on_its_steps_and_changes_by_a_factor_of_about_two(
    present: float, measured: float
) -> None:
    found = next_weight(present, measured)
    assert LEAST_WEIGHT <= found <= 1.0
    assert found / STEP == round(found / STEP)
    assert found == present or abs(found - present) >= STEP
    assert present / 2 - STEP / 2 <= found <= 2 * present + STEP / 2


@given(WEIGHTS, st.floats(-2, 3))
def test_of_equal_measurements_a_weight_comes_to_rest_within_a_step(present: float, measured: float) -> None:
    for _ in range(5):
        present = next_weight(present, measured)
    assert next_weight(present, measured) == present
    assert abs(present - max(LEAST_WEIGHT, min(1.0, measured))) <= STEP


@given(WEIGHTS, st.floats(0.25, 1))
def test_noise_below_a_step_changes_no_weight(present: float, measured: float) -> None:
    if abs(measured - present) < STEP:
        assert next_weight(present, measured) == present


def test_only_compressed_replicas_weigh_less_and_each_by_its_share() -> None:
    spec = spec_of(2, 1, 2, inner__microbatches=4)
    plan = [replica(0), replica(1, 8, microbatches=6, weight=1.5), replica(2, 0)]
    assert [is_compressed(each) for each in plan] == [False, True, False]
    assert [each.weight for each in weighed(spec, plan, 0.5)] == [1.0, 0.75, 1.0]
    assert weighed(spec, weighed(spec, plan, 0.5), 1.0) == plan


def test_no_full_replica_decides_alone() -> None:
    """Were it late, no round could be committed without it."""
    spec = spec_of(2, 1, 3, inner__microbatches=4)
    pipelines = [replica(number, 8) for number in (1, 2, 3)]
    assert [each.weight for each in weighed(spec, [replica(0, 0), *pipelines], 0.25)] == [1.0] * 4
    assert [each.weight for each in weighed(spec, [replica(0, 0), replica(4, 0), *pipelines], 0.25)] == [
        *(1.0, 1.0, 0.25, 0.25, 0.25)
    ]
    strong = replica(0, 0, microbatches=8)
    found = [each.weight for each in weighed(spec, [strong, replica(4, 0), *pipelines, replica(5, 8)], 0.25)]
    assert found == [2.0, 1.0, *[0.375] * 4], "0.25 would give it exactly half"
    strong = replica(0, 0, microbatches=12)
    found = [each.weight for each in weighed(spec, [strong, replica(4, 0), *pipelines], 0.25)]
    assert found == [3.0, 1.0, 0.75, 0.75, 0.75]


WORK = st.integers(1, 40)


@given(st.integers(1, 12), st.lists(WORK, max_size=4), st.lists(WORK, min_size=1, max_size=4), WEIGHTS)
def test_weights_are_at_most_the_work_and_of_full_replicas_the_work(
    usual: int, full: list[int], compressed: list[int], measured: float
) -> None:
    spec = spec_of(2, 1, 2, inner__microbatches=usual)
    plan = [replica(number, 0, microbatches=n) for number, n in enumerate(full)]
    plan += [replica(len(full) + number, 8, microbatches=n) for number, n in enumerate(compressed)]
    found = [each.weight for each in weighed(spec, plan, measured)]
    work = [work_of(spec, each) for each in plan]
    assert found[: len(full)] == work[: len(full)]
    factors = {each / of for each, of in zip(found[len(full) :], work[len(full) :], strict=True)}
    assert max(factors) - min(factors) < 1e-9
    assert measured - 1e-9 <= min(factors) <= max(factors) <= 1 + 1e-9
    if len(full) > 1 and max(full) / usual < 0.999 * sum(work) / 2:
        assert max(found[: len(full)]) < sum(found) / 2
