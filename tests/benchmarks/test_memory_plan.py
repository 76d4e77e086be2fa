"""The resident memory of a worker is what is planned for it, with each policy."""

from __future__ import annotations

import pytest

from benchmarks.memory_plan import measured
from benchmarks.resident import CLEAR
from node.core.optimizer.inner import OPTIMIZERS
from protocol.memory.needs import BY_PRICE


@pytest.mark.slow
@pytest.mark.skipif(not CLEAR.exists(), reason="no peak of memory from a moment on")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_plan_is_within_a_tenth_and_the_anchor_the_same(optimizer: str) -> None:
    table = measured(25_000_000, optimizer)
    found = {policy: (float(peak), float(plan)) for policy, peak, plan, _ in table.rows}
    assert found.keys() == {str(policy) for policy in BY_PRICE}
    assert {policy for policy, (peak, plan) in found.items() if abs(peak / plan - 1) > 0.1} == set()
