"""The batch of the whole swarm: how many microbatches its replicas take together, and the learning rate.

With ``grouping.batch = "variable"`` the batch is ``inner.microbatches`` for each replica. With "constant" it
is ``grouping.global_batch`` samples, however many replicas there are. It differs in two cases:

- More replicas than microbatches: each takes one, and the batch is that much larger.
- ``grouping.longest_phase`` seconds are too short for the whole batch: it is what fits, at least one
  microbatch of each replica.

AdamW's learning rate for a batch of B instead of B_0 samples is scaled by sqrt(B / B_0): this keeps the noise
of its steps (Malladi et al., "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms", arXiv
2205.10287). B is the batch of all replicas, because the outer step averages what they learn: as long as B
stays, so does the noise of the anchor, whether two replicas or twenty divide the batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import sqrt

from protocol.spec.run import RunSpec
from protocol.types import Replica


def whole_batch(spec: RunSpec, replicas: int) -> int:
    """Microbatches of one inner step of all `replicas` together, if they have time for all of them."""
    if spec.grouping.batch == "variable":
        return spec.inner.microbatches * replicas
    return max(replicas, spec.global_batch // spec.inner.microbatch_size)


def work_of(spec: RunSpec, replica: Replica) -> float:
    """Microbatches of `replica` in a step, as a multiple of `inner.microbatches`.

    This is its weight, unless `grouping.weights` is "measured" (protocol.algorithm.compressed_weight).
    """
    return spec.microbatches_of(replica) / spec.inner.microbatches


def work_behind(spec: RunSpec, replica: Replica, weight: float) -> float:
    """The work behind a payload of this weight, of a member of `replica`: in the unit of :func:`work_of`."""
    work = work_of(spec, replica)
    # Exactly the work where that is the weight, and behind a payload of the whole weight.
    return weight if replica.weight == work else work * (weight / replica.weight)


def batch_of(spec: RunSpec, replicas: Iterable[Replica]) -> int:
    """Samples of one inner step of all `replicas` together, under their present shares."""
    return spec.inner.microbatch_size * sum(map(spec.microbatches_of, replicas))


def learning_rate_factor(spec: RunSpec, replicas: Iterable[Replica]) -> float:
    """The factor of the learning rate of all `replicas` of a plan; 1 unless their batch is too small.

    It is never above 1: the specification's learning rate is the highest of the run.
    """
    if spec.grouping.batch == "variable":
        return 1.0
    return min(1.0, sqrt(batch_of(spec, replicas) / spec.global_batch))


def equal_shares(total: int, replicas: int) -> list[int]:
    """`total` microbatches in equal shares; the first replicas take one more where they do not divide."""
    least, more = divmod(total, replicas)
    return [least + (position < more) for position in range(replicas)]


def with_shares(spec: RunSpec, replicas: Sequence[Replica], shares: Sequence[int]) -> list[Replica]:
    """`replicas` that take these microbatches of a step and weigh accordingly."""
    usual = spec.inner.microbatches
    return [
        replace(replica, microbatches=0 if share == usual else share, weight=share / usual)
        for replica, share in zip(replicas, shares, strict=True)
    ]


def with_equal_shares(spec: RunSpec, replicas: Sequence[Replica]) -> list[Replica]:
    """`replicas` that divide the whole batch equally, as in the first plan."""
    count = len(replicas)
    return with_shares(spec, replicas, equal_shares(whole_batch(spec, count), count))
