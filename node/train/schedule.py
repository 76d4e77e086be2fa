"""The schedules of the inner phase: learning rates over the run, the order of microbatches in a step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from protocol.spec import InnerSpec


def learning_rate(inner: InnerSpec, step: int, total_steps: int) -> float:
    """Learning rate of inner step `step` of the run, 0 <= step < total_steps.

    Linear warm-up to the peak at step ``warmup_steps - 1``, then a cosine that ends at ``final_ratio`` of
    the peak. The step counts over the run and is no AdamW bias-correction step: a node that joins late has
    the run's step, but fresh moments.
    """
    if step < inner.warmup_steps:
        return inner.learning_rate * (step + 1) / inner.warmup_steps
    progress = min(1.0, (step - inner.warmup_steps) / max(1, total_steps - inner.warmup_steps))
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return inner.learning_rate * (inner.final_ratio + (1.0 - inner.final_ratio) * cosine)


def cold_factor(taken: int, cold_steps: int) -> float:
    """What the learning rate is multiplied by after `taken` steps with moments that started in mid-run.

    Fresh moments make AdamW's first steps as long as the rate allows, whatever the gradient's size: so the
    rate rises over `cold_steps` steps, as it does at the start of a run.
    """
    return min(1.0, (taken + 1) / cold_steps) if cold_steps else 1.0


class OpKind(StrEnum):
    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True)
class Op:
    """One piece of a member's work in an inner step."""

    kind: OpKind
    microbatch: int


def one_forward_one_backward(position: int, members: int, microbatches: int) -> tuple[Op, ...]:
    """The order of work of the member at `position` of a chain of `members`, for one inner step (1F1B).

    A member first runs as many forwards as there are members behind it (``members - 1 - position``): until
    the first gradient can come back to it, each of those members must have had a microbatch to work on.
    From then on one forward alternates with one backward, and the backwards left over end the step. So at
    most ``members - position`` microbatches hold activations at a time, however many there are.
    """
    if not 0 <= position < members or microbatches < 1:
        raise ValueError(f"no position {position} of {members} members with {microbatches} microbatches")
    warm_up = min(members - 1 - position, microbatches)
    order = [Op(OpKind.FORWARD, microbatch) for microbatch in range(warm_up)]
    for microbatch in range(microbatches):
        if warm_up + microbatch < microbatches:
            order.append(Op(OpKind.FORWARD, warm_up + microbatch))
        order.append(Op(OpKind.BACKWARD, microbatch))
    return tuple(order)
