"""The learning rate over a run, and the order of microbatches in a step."""

from __future__ import annotations

import itertools
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.core.optimizer.schedule import learning_rate
from protocol.math.microbatch_order import Op, OpKind, most_in_flight, one_forward_one_backward
from protocol.spec.sections import InnerSpec

CHAINS = st.tuples(st.integers(1, 6), st.integers(1, 12))


def test_learning_rate_warms_up_linearly_to_the_peak() -> None:
    inner = InnerSpec(learning_rate=2.0, warmup_steps=4)
    assert [learning_rate(inner, step, 100) for step in range(4)] == [0.5, 1.0, 1.5, 2.0]


def test_learning_rate_falls_from_the_peak_to_the_final_ratio_as_a_cosine() -> None:
    inner = InnerSpec(learning_rate=2.0, warmup_steps=10, final_ratio=0.1)
    rates = [learning_rate(inner, step, 110) for step in range(10, 111)]
    assert rates[0] == 2.0
    assert rates[50] == pytest.approx(1.1)
    assert rates[-1] == pytest.approx(0.2)
    assert all(later < earlier for earlier, later in itertools.pairwise(rates))


@pytest.mark.parametrize(("quarters", "above_the_end"), [(1, 0.853553390593), (2, 0.5), (3, 0.146446609407)])
def test_the_decay_is_a_cosine_and_not_a_line(quarters: int, above_the_end: float) -> None:
    """0.5 (1 + cos(pi x)) after a quarter, a half and three quarters of the decay."""
    inner = InnerSpec(learning_rate=2.0, warmup_steps=10, final_ratio=0.1)
    rate = learning_rate(inner, 10 + 25 * quarters, 110)
    assert rate == pytest.approx(2.0 * (0.1 + 0.9 * above_the_end), rel=1e-9)


@pytest.mark.parametrize("total", [1, 5, 30])
def test_learning_rate_of_a_run_shorter_than_its_warm_up_stays_positive(total: int) -> None:
    inner = InnerSpec(warmup_steps=30)
    assert all(0 < learning_rate(inner, step, total) <= inner.learning_rate for step in range(total))


@given(CHAINS)
def test_every_microbatch_goes_forward_once_then_backward_once(chain: tuple[int, int]) -> None:
    members, microbatches = chain
    for position in range(members):
        order = one_forward_one_backward(position, members, microbatches)
        for kind in OpKind:
            assert [op.microbatch for op in order if op.kind is kind] == list(range(microbatches))
        for microbatch in range(microbatches):
            forward = order.index(Op(OpKind.FORWARD, microbatch))
            assert forward < order.index(Op(OpKind.BACKWARD, microbatch))


@given(CHAINS)
def test_a_member_holds_two_microbatches_for_each_member_behind_and_its_own(
    chain: tuple[int, int],
) -> None:
    members, microbatches = chain
    for position in range(members):
        in_flight = peak = 0
        for op in one_forward_one_backward(position, members, microbatches):
            in_flight += 1 if op.kind is OpKind.FORWARD else -1
            peak = max(peak, in_flight)
        assert in_flight == 0
        assert peak == min(most_in_flight(members - position), microbatches)


@given(CHAINS)
def test_all_members_together_never_wait_for_each_other_forever(chain: tuple[int, int]) -> None:
    members, microbatches = chain
    waiting = [list(one_forward_one_backward(position, members, microbatches)) for position in range(members)]
    done: set[tuple[int, Op]] = set()
    while any(waiting):
        ready = [
            (position, order[0])
            for position, order in enumerate(waiting)
            if order and _source(position, order[0], members) in done | {None}
        ]
        assert ready, "all members wait"
        for position, op in ready:
            waiting[position].remove(op)
            done.add((position, op))


@pytest.mark.parametrize("chain", [(2, 3), (3, 5), (4, 8)])
def test_at_equal_speed_a_step_takes_no_longer_than_fill_work_and_drain(chain: tuple[int, int]) -> None:
    members, microbatches = chain
    waiting = [list(one_forward_one_backward(position, members, microbatches)) for position in range(members)]
    done: set[tuple[int, Op]] = set()
    ticks = 0
    while any(waiting):
        finished = {
            (position, order.pop(0))
            for position, order in enumerate(waiting)
            if order and _source(position, order[0], members) in done | {None}
        }
        done |= finished
        ticks += 1
    assert ticks == 2 * (microbatches + members - 1)


def _source(position: int, op: Op, members: int) -> tuple[int, Op] | None:
    """The work of a neighbour that must be done first."""
    neighbour = position - 1 if op.kind is OpKind.FORWARD else position + 1
    return (neighbour, op) if 0 <= neighbour < members else None


@pytest.mark.parametrize(("position", "members", "microbatches"), [(2, 2, 4), (-1, 2, 4), (0, 1, 0)])
def test_impossible_chains_are_refused(position: int, members: int, microbatches: int) -> None:
    with pytest.raises(ValueError, match="no position"):
        one_forward_one_backward(position, members, microbatches)


def test_with_decay_rounds_the_rate_stays_at_its_peak_until_they_begin() -> None:
    inner = InnerSpec(learning_rate=2.0, warmup_steps=10, final_ratio=0.1, steps=5, decay_rounds=4)
    rates = [learning_rate(inner, step, 100) for step in range(101)]
    assert rates[10:81] == [2.0] * 71
    assert rates[85] == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))  # a quarter is over: 1 - sqrt(1/4)
    assert rates[100] == pytest.approx(0.2)
    assert all(before > after for before, after in pairwise(rates[80:]))


def test_a_decay_longer_than_the_run_begins_after_the_warm_up() -> None:
    inner = InnerSpec(learning_rate=2.0, warmup_steps=10, final_ratio=0.0, steps=5, decay_rounds=400)
    assert learning_rate(inner, 9, 100) == learning_rate(inner, 10, 100) == 2.0
    assert learning_rate(inner, 100, 100) == 0.0
