"""The batch of the whole swarm: how it is divided."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import HetnodeError
from protocol.group.batch import (
    batch_of,
    equal_shares,
    whole_batch,
    with_equal_shares,
)
from protocol.math.sampling import sample_range
from protocol.run_files.resolve import resolve
from protocol.spec.run import RunSpec
from protocol.types import Plan, Replica


def constant(global_batch: int = 24, **overrides: Any) -> RunSpec:
    """Microbatches of 2 samples."""
    given = {"grouping.batch": "constant", "grouping.global_batch": global_batch}
    return resolve("nano", overrides={**given, **overrides})


def replicas(count: int) -> list[Replica]:
    return [Replica(index, (), ()) for index in range(count)]


@given(st.integers(1, 10_000), st.integers(1, 500))
def test_equal_shares_add_up_and_differ_by_at_most_one(more: int, count: int) -> None:
    shares = equal_shares(count - 1 + more, count)
    assert sum(shares) == count - 1 + more
    assert min(shares) >= 1
    assert max(shares) - min(shares) <= 1
    assert shares == sorted(shares, reverse=True)


@given(st.integers(1, 12))
def test_a_constant_batch_does_not_follow_the_replicas(count: int) -> None:
    spec = constant(24)
    shared = with_equal_shares(spec, replicas(count))
    assert batch_of(spec, shared) == 24
    assert sum(each.weight for each in shared) * spec.inner.microbatches == pytest.approx(12)
    plan = Plan(1, 1, 0, tuple(shared), "")
    trained = [n for each in shared for n in sample_range(plan, spec, 1, each.index)]
    assert trained == list(range(24 * spec.inner.steps))


def test_more_replicas_than_microbatches_take_one_each() -> None:
    spec = constant(24)
    assert whole_batch(spec, 13) == 13
    shared = with_equal_shares(spec, replicas(13))
    assert batch_of(spec, shared) == 26


def test_a_variable_batch_follows_the_replicas() -> None:
    spec = resolve("nano")
    assert whole_batch(spec, 5) == 5 * spec.inner.microbatches
    assert with_equal_shares(spec, replicas(3)) == replicas(3)


@pytest.mark.parametrize(
    "overrides",
    [
        {"grouping.batch": "constant", "grouping.global_batch": 23},  # microbatches of 2
        {"grouping.batch": "constant", "grouping.global_batch": 2},  # of two replicas
        {"grouping.global_batch": 24},
    ],
)
def test_batches_that_cannot_be_divided_are_refused(overrides: dict[str, Any]) -> None:
    with pytest.raises(HetnodeError, match="global_batch"):
        resolve("nano", overrides=overrides)


def test_the_size_of_a_constant_batch() -> None:
    spec = constant(24)
    assert spec.global_batch == 24
    # As many as the replicas take with which the run starts.
    assert constant(0).global_batch == 2 * spec.inner.microbatches * spec.inner.microbatch_size


def test_specifications_with_a_variable_batch_have_no_field_for_it() -> None:
    left_out = {"batch", "global_batch", "longest_phase"}
    assert not left_out & resolve("nano").tree["grouping"].keys()
    spec = constant(24)
    assert left_out <= spec.tree["grouping"].keys()
    assert RunSpec.from_json(spec.canonical_json) == spec
