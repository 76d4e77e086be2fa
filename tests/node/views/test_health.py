"""What `hetnode status` shows of the health of the training."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console

from node.views.status import status_view
from protocol.status import Cause, CauseCode, HealthFinding, Sign, StageHealth, TrainingHealth
from tests.builders import status_of

STAGE = StageHealth(0, 4, 0.058, -0.029, 0.061, None, 0.054, 0.032, 0.39, 0.21)


def shown(health: TrainingHealth | None, alarm: Cause | None = None) -> list[str]:
    console = Console(width=80)
    with console.capture() as captured:
        console.print(status_view(replace(status_of(), health=health, alarm=alarm)))
    return captured.get().splitlines()


def test_stages_that_agree_least_are_shown_in_80_columns() -> None:
    stages = tuple(replace(STAGE, stage=stage, least_cosine=-0.001 * stage) for stage in range(30))
    lines = shown(TrainingHealth(9, stages, 0.87, ()))
    assert max(map(len, lines)) <= 80
    assert "training in round 9, error feedback 87%: nothing unusual" in lines
    (header,) = (line for line in lines if line.startswith("stage"))
    assert header.split() == [
        "stage",
        "payloads",
        "agree",
        "least",
        "full",
        "pipeline",
        "same",
        "kind",
        "other",
        "norm",
    ]
    assert [line.split()[0] for line in lines if " 0.058 " in line] == [str(each) for each in range(22, 30)]
    assert any("the 8 of 30 stages that agree least" in line for line in lines)


def test_alarm_and_findings_are_text() -> None:
    finding = HealthFinding(Sign.LOSS, "[red]x\x1b[0m")
    alarm = Cause(CauseCode.ALARM, round_number=9, detail="[b]rose")
    text = " ".join(shown(TrainingHealth(9, (STAGE,), None, (finding,) * 9), alarm))
    assert "ALARM: [b]rose" in text
    assert "[red]x" in text
    assert "\x1b" not in text
    assert "and 3 more" in text


def test_before_a_round_was_judged_nothing_is_shown() -> None:
    assert not [line for line in shown(None) if "error feedback" in line or "ALARM" in line]
