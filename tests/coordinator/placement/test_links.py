"""The widths k of links: how they follow the measured bandwidths."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from coordinator.placement.cost_model import Survey, memory_needed, message_bytes
from coordinator.placement.tuning import choose_k
from protocol.run_files.resolve import resolve
from protocol.spec.run import RunSpec
from protocol.types import StageRange
from tests.support.cost_model import MEGABIT, capacity, chain, survey


def adapting(**overrides: Any) -> RunSpec:
    return resolve(
        overrides={
            "link.least_k": 4,
            "link.most_k": 64,
            "link.k": 16,
            "model.layers": 3,
            "swarm.stages": 3,
            **overrides,
        }
    )


def test_k_is_the_widest_that_hardly_makes_a_step_longer() -> None:
    spec = adapting()
    members = chain(spec)

    def chosen(mbit: float) -> tuple[int, ...]:
        lines = capacity(1e10, up=mbit * MEGABIT, down=mbit * MEGABIT)
        return choose_k(spec, survey(lines, lines, lines), members, None)

    assert chosen(10_000) == (64, 64)
    assert chosen(0.1) == (4, 4)
    widths = [sum(chosen(mbit)) for mbit in (0.1, 1, 2, 4, 8, 16, 32, 64, 10_000)]
    assert widths == sorted(widths)
    assert len(set(widths)) > 3


def test_only_the_slow_link_of_a_chain_gets_a_narrow_k() -> None:
    spec = adapting()
    fast, slow = (capacity(1e10, up=each, down=each) for each in (1e9, 0.3 * MEGABIT))
    assert choose_k(spec, survey(fast, fast, slow), chain(spec), None) == (64, 4)


def test_k_stays_if_the_run_does_not_adapt_it_or_no_speed_is_known() -> None:
    slow = capacity(1e10, up=MEGABIT, down=MEGABIT)
    fixed = adapting(**{"link.least_k": 0, "link.most_k": 0})
    assert choose_k(fixed, survey(slow, slow, slow), chain(fixed), None) == (16, 16)
    spec = adapting()
    assert choose_k(spec, Survey(), chain(spec), None) == (16, 16)
    assert choose_k(spec, Survey(), chain(spec), (8, 32)) == (8, 32)
    unknown = replace(slow, flops=0.0)
    assert choose_k(spec, survey(unknown, unknown, unknown), chain(spec), (8, 32)) == (8, 32)


def test_k_moves_one_value_at_a_time_and_stays_where_it_is_right() -> None:
    spec = adapting()
    members = chain(spec)
    lines = capacity(1e10, up=1e9, down=1e9)
    fast = survey(lines, lines, lines)
    lines = capacity(1e10, up=0.1 * MEGABIT, down=0.1 * MEGABIT)
    slow = survey(lines, lines, lines)
    path = [(16, 16)]
    for known in (fast, fast, fast, slow, slow, slow, slow, slow):
        path.append(choose_k(spec, known, members, path[-1]))
    assert path == [(k, k) for k in (16, 32, 64, 64, 32, 16, 8, 4, 4)]
    assert choose_k(spec, fast, members, (24, 24)) == (32, 32)


def test_an_uncompressed_link_is_the_widest_choice_where_the_run_allows_it() -> None:
    spec = adapting(**{"link.uncompressed": True})
    members = chain(spec)
    lines = capacity(1e10, up=1e9, down=1e9)
    fast = survey(lines, lines, lines)
    lines = capacity(1e10, up=0.1 * MEGABIT, down=0.1 * MEGABIT)
    slow = survey(lines, lines, lines)
    assert choose_k(spec, fast, members, None) == (0, 0)
    assert choose_k(spec, slow, members, None) == (4, 4)
    path = [(16, 16)]
    for known in (fast, fast, fast, fast, slow, slow, slow, slow, slow, slow):
        path.append(choose_k(spec, known, members, path[-1]))
    assert path == [(k, k) for k in (16, 32, 64, 0, 0, 64, 32, 16, 8, 4, 4)]
    # The run may have begun with a k that is not one of the possible ones.
    assert choose_k(spec, fast, members, (24, 0)) == (32, 0)


def test_a_link_is_uncompressed_only_if_its_own_line_carries_all_of_d() -> None:
    spec = adapting(**{"link.uncompressed": True, "link.k": 0})
    fast, slow = (capacity(1e10, up=each, down=each) for each in (1e9, 0.3 * MEGABIT))
    assert choose_k(spec, survey(fast, fast, slow), chain(spec), None) == (0, 4)
    assert choose_k(spec, survey(fast, fast, slow), chain(spec), (0, 0)) == (0, 64)
    assert choose_k(spec, Survey(), chain(spec), None) == (0, 0)


def test_an_uncompressed_link_costs_the_bytes_of_d_values_and_keeps_the_basis_in_memory() -> None:
    fixed, adapts = adapting(**{"link.least_k": 0, "link.most_k": 0, "link.k": 0}), adapting()
    tokens, d = fixed.inner.microbatch_size * fixed.model.context, fixed.model.width
    assert message_bytes(fixed, 0)[1] == tokens * d * 2
    assert message_bytes(fixed, 0)[0] - message_bytes(fixed, 8)[0] == tokens * (d - 8) * 2
    member = StageRange(1, 2)
    with_basis = memory_needed(adapting(**{"link.uncompressed": True, "link.k": 0}), member, 1)
    assert with_basis == memory_needed(adapts, member, 1) > memory_needed(fixed, member, 1)


@given(st.floats(0.05, 500), st.floats(0.05, 500), st.booleans())
def test_k_does_not_oscillate_while_the_bandwidth_stays(one: float, other: float, uncompressed: bool) -> None:
    spec = adapting(**{"link.uncompressed": uncompressed})
    lines = [capacity(1e10, up=each * MEGABIT, down=each * MEGABIT) for each in (one, other, 50)]
    ks: tuple[int, ...] = (16, 16)
    seen = []
    for _ in range(8):
        ks = choose_k(spec, survey(*lines), chain(spec), ks)
        seen.append(ks)
    assert seen[-1] == seen[-2] == seen[-3]
