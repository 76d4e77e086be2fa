"""The health of the training as ``hetnode status`` shows it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from coordinator.status.cause_text import cause_text
from node.views.text import as_text
from protocol.status import RunStatus, StageHealth, TrainingHealth

_MOST_STAGES, _MOST_FINDINGS = 8, 6
_ALARM_CHARACTERS = 1000


def alarm_line(status: RunStatus) -> Iterator[Text]:
    """What the alarm has seen, if there is one."""
    if status.alarm:
        yield as_text(f"ALARM: {cause_text(status.alarm)}", "bold red", _ALARM_CHARACTERS)


def health_view(health: TrainingHealth | None) -> Iterator[RenderableType]:
    """How far payloads agree, by stage, and what is unusual; nothing before a round was judged."""
    if health is None:
        return
    share = "" if health.error_share is None else f", error feedback {health.error_share:.0%}"
    usual = "" if health.findings else ": nothing unusual"
    yield as_text(f"training in round {health.round_number}{share}{usual}")
    for finding in health.findings[:_MOST_FINDINGS]:
        yield as_text(finding.sentence, "yellow")
    if hidden := len(health.findings) - _MOST_FINDINGS:
        yield from [Text(f"and {hidden} more", "yellow")] * (hidden > 0)
    if any(stage.payloads > 1 for stage in health.stages):
        yield _agreement_table(health.stages)


def _agreement_table(stages: Sequence[StageHealth]) -> Table:
    """The stages whose payloads agree least, in their order."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold underline")
    table.add_column("stage")
    for name in ("payloads", "agree", "least", "full", "pipeline", "same kind", "other", "norm"):
        table.add_column(name, justify="right", no_wrap=True)
    by_cosine = sorted(stages, key=lambda each: 1.0 if each.least_cosine is None else each.least_cosine)
    for each in sorted(by_cosine[:_MOST_STAGES], key=lambda each: each.stage):
        cosines = (each.cosine, each.least_cosine, each.full_cosine, each.pipeline_cosine)
        pairs = (each.alike, each.unlike)
        table.add_row(
            str(each.stage), str(each.payloads), *map(_cosine, (*cosines, *pairs)), f"{each.norm:.3g}"
        )
    if len(stages) > _MOST_STAGES:
        table.caption = f"the {_MOST_STAGES} of {len(stages)} stages that agree least"
    return table


def _cosine(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
