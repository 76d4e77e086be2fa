"""Stages that exchange in turn: who is due, and how much progress a payload has."""

from __future__ import annotations

from typing import Any

import pytest

from protocol.errors import ErrorCode, HetnodeError
from protocol.math.turns import is_due, rounds_behind
from protocol.run_files.resolve import resolve
from protocol.spec.run import RunSpec

STAGES = range(4)


def spec_of(turns: int, rounds: int, **overrides: Any) -> RunSpec:
    run = {"swarm.stages": 4, "rounds": rounds, "outer.turns": turns, "outer.overlap": 1}
    return resolve("nano", overrides=run | overrides)


@pytest.mark.parametrize("turns", [1, 2])
@pytest.mark.parametrize("rounds", [1, 2, 7, 12])
def test_each_stage_has_one_turn_in_each_cycle_and_the_progress_of_all_rounds_is_exchanged_once(
    turns: int, rounds: int
) -> None:
    spec = spec_of(turns, rounds)
    for stage in STAGES:
        due = [number for number in range(1, rounds + 1) if is_due(spec, stage, number)]
        assert due[-1] == rounds
        assert all(later - earlier <= turns for earlier, later in zip([0, *due], due, strict=False))
        assert [rounds_behind(spec, stage, number) for number in due] == [
            later - earlier for earlier, later in zip([0, *due], due, strict=False)
        ]
    usual = range(1, rounds)
    assert all(any(is_due(spec, stage, number) for stage in STAGES) for number in usual)


def test_a_run_without_turns_does_not_mention_them() -> None:
    usual = spec_of(1, 5)
    assert usual.hash == resolve("nano", overrides={"swarm.stages": 4, "rounds": 5, "outer.overlap": 1}).hash
    assert "turns" not in usual.canonical_json
    assert RunSpec.from_json(spec_of(2, 5).canonical_json).outer.turns == 2


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        ({"outer.turns": 3}, "turns"),
        ({"swarm.stages": 1, "swarm.pipelines": 0, "swarm.replicas": 2}, "swarm.stages"),
        ({"outer.exchange": "reduced"}, "turns"),
        ({"outer.overlap": 0}, "overlap is 0"),
    ],
)
def test_what_cannot_take_turns_is_refused(overrides: dict[str, Any], match: str) -> None:
    with pytest.raises(HetnodeError, match=match) as caught:
        spec_of(2, 5, **overrides)
    assert caught.value.code is ErrorCode.BAD_SPEC
