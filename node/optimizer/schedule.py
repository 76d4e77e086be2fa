"""The learning rate over the run."""

from __future__ import annotations

import math

from protocol.spec.sections import InnerSpec


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
