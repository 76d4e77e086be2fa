"""The batch of the whole swarm: how many microbatches its replicas take together.

With ``grouping.batch = "variable"`` the batch is ``inner.microbatches`` for each replica. With "constant" it
is ``grouping.global_batch`` samples, however many replicas there are. With more replicas than microbatches
each takes one, and the batch is that much larger.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from protocol.spec.run import RunSpec
from protocol.types import Replica


def whole_batch(spec: RunSpec, replicas: int) -> int:
    """Microbatches of one inner step of all `replicas` together."""
    if spec.grouping.batch == "variable":
        return spec.inner.microbatches * replicas
    return max(replicas, spec.global_batch // spec.inner.microbatch_size)


def work_of(spec: RunSpec, replica: Replica) -> float:
    """Microbatches of `replica` in a step, as a multiple of `inner.microbatches`: its weight in a round."""
    return spec.microbatches_of(replica) / spec.inner.microbatches


def batch_of(spec: RunSpec, replicas: Iterable[Replica]) -> int:
    """Samples of one inner step of all `replicas` together, under their present shares."""
    return spec.inner.microbatch_size * sum(map(spec.microbatches_of, replicas))


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
