"""The facts about a run that every face shows as they are: a label and a text each.

The dashboard, ``hetnode watch`` and ``hetnode status --json`` show whatever is in :data:`FACTS`.
"""

from __future__ import annotations

from collections.abc import Callable

from coordinator.base.phrases import change_text, counted
from protocol.group.batch import batch_of
from protocol.status import RunStatus

_MOST_EVALUATIONS = 12


def _model(status: RunStatus) -> str:
    model = status.spec.model
    return (
        f"{status.parameters:,} parameters: {model.layers} layers of width {model.width}, "
        f"vocabulary {model.vocabulary:,}, context {model.context:,}"
    )


def _round(status: RunStatus) -> str:
    inner, stages = status.spec.inner, counted(status.spec.swarm.stages, "stage")
    batches = f"{inner.microbatches} microbatch{'' if inner.microbatches == 1 else 'es'}"
    return f"{counted(inner.steps, 'inner step')} of {batches}, {stages}"


def _batch(status: RunStatus) -> str:
    if status.plan is None:
        return "none yet"
    spec, replicas = status.spec, status.plan.replicas
    wanted = f" of {spec.global_batch:,}" if spec.grouping.batch == "constant" else ""
    return f"{batch_of(spec, replicas):,}{wanted} samples of all replicas in an inner step"


def _plan(status: RunStatus) -> str:
    plan = status.plan
    return "none yet" if plan is None else f"{plan.epoch}, since round {plan.from_round}: {plan.reason}"


def _changes(status: RunStatus) -> str:
    return "; ".join(map(change_text, status.changes)) or "none"


def _evaluations(status: RunStatus) -> str:
    found = [
        f"{each.name}: {', '.join(f'{metric} {value:.4g}' for metric, value in each.figures.items())}, "
        f"round {each.round_number}"
        for each in status.evaluations
        if each.figures
    ]
    return "; ".join(found[:_MOST_EVALUATIONS]) or "none"


FACTS: dict[str, Callable[[RunStatus], str]] = {
    "Model": _model,
    "Round": _round,
    "Batch": _batch,
    "Plan": _plan,
    "Changes": _changes,
    "Evaluations": _evaluations,
    "Specification": lambda status: status.spec.identity,
    "Run": lambda status: status.run,
}
"""By label, in the order in which they are shown. A new fact is a line here."""


def facts_of(status: RunStatus) -> dict[str, str]:
    """The text of each fact."""
    return {label: text(status) for label, text in FACTS.items()}
