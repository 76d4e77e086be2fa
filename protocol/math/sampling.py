"""The sample ordinals that a replica trains in a round. They follow from the plan, so no peer sends them.

Ordinals count the samples of the whole run from 0. A plan assigns them without gaps from
``plan.first_sample`` on: round after round, and within a round one contiguous block per replica, in the order
of ``plan.replicas``. The next plan starts at :func:`next_first_sample`, so no sample is assigned twice and
none is left out; or earlier, at the first sample of a round of which nothing is left.
"""

from __future__ import annotations

from protocol.spec.run import RunSpec
from protocol.types import Plan


def sample_range(plan: Plan, spec: RunSpec, round_number: int, replica_index: int) -> range:
    """Ordinals that the replica with ``index == replica_index`` trains in `round_number`.

    Raises ValueError if the round lies before the plan, or the plan has no such replica.
    """
    position = next((i for i, replica in enumerate(plan.replicas) if replica.index == replica_index), None)
    if position is None:
        raise ValueError(f"plan {plan.epoch} has no replica {replica_index}")
    sizes = _samples_per_round(plan, spec)
    first = next_first_sample(plan, spec, round_number) + sum(sizes[:position])
    return range(first, first + sizes[position])


def next_first_sample(plan: Plan, spec: RunSpec, next_round: int) -> int:
    """First ordinal that `plan` has not assigned when rounds ``plan.from_round .. next_round - 1`` are over.

    It is the ``first_sample`` of a plan from `next_round` on. Raises ValueError if that lies before `plan`.
    """
    if next_round < plan.from_round:
        raise ValueError(
            f"round {next_round} lies before plan {plan.epoch}, which starts at {plan.from_round}"
        )
    return plan.first_sample + (next_round - plan.from_round) * sum(_samples_per_round(plan, spec))


def _samples_per_round(plan: Plan, spec: RunSpec) -> list[int]:
    """The samples of each replica, in the order of the plan."""
    return [spec.samples_per_round(spec.microbatches_of(replica)) for replica in plan.replicas]
