"""The learning rate over the run."""

from __future__ import annotations

import math

from protocol.spec.fixed import COLD_STEPS
from protocol.spec.sections import InnerSpec


def learning_rate(inner: InnerSpec, step: int, total_steps: int) -> float:
    """Learning rate of inner step `step` of the run, 0 <= step < total_steps.

    Linear warm-up to the peak at step ``warmup_steps - 1``, then a cosine that ends at ``final_ratio`` of
    the peak; or, with ``decay_rounds``, the peak, and over the steps of these last rounds 1 - sqrt (arXiv
    2405.18392, eq. 1). `step` counts from the start of the run. It differs from the step count that AdamW
    uses for bias correction: a node that joins late uses the run's step here, but its moments start from 0.
    """
    if step < inner.warmup_steps:
        # step + 1: the first step already has a rate above 0.
        return inner.learning_rate * (step + 1) / inner.warmup_steps
    if inner.decay_rounds:
        first = max(inner.warmup_steps, total_steps - inner.decay_rounds * inner.steps)
        left = 1.0 - math.sqrt(_progress(step, first, total_steps))
    else:
        left = 0.5 * (1.0 + math.cos(math.pi * _progress(step, inner.warmup_steps, total_steps)))
    return inner.learning_rate * (inner.final_ratio + (1.0 - inner.final_ratio) * left)


def _progress(step: int, first: int, end: int) -> float:
    """The part of the steps `first` to `end` that is over at `step`, 0 before them."""
    return min(1.0, max(0, step - first) / max(1, end - first))


def cold_factor(taken: int) -> float:
    """Factor of the learning rate after `taken` steps with moments that started in the middle of the run.

    With new moments, AdamW's first steps have about the full length of the learning rate, even for small
    gradients. Therefore the rate rises over COLD_STEPS steps, as it does at the start of a run.
    """
    return min(1.0, (taken + 1) / COLD_STEPS)
