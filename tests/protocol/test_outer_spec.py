"""The outer optimizer in a run's specification: one line of a run file, and no byte where it is not used."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.placement.cost_model import memory_needed
from protocol.errors import ErrorCode, HetnodeError
from protocol.run_files.resolve import resolve, to_toml
from protocol.spec.run import RunSpec
from protocol.types import StageRange


def test_nesterov_is_one_line_of_the_run_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[outer]\noptimizer = "nesterov"\n')
    spec = resolve("nano", file)
    assert (spec.outer.optimizer, spec.outer.momentum, spec.outer.learning_rate) == ("nesterov", 0.9, 0.7)
    assert RunSpec.from_json(spec.canonical_json) == spec
    file.write_text(to_toml(spec))
    assert resolve(file=file) == spec
    assert spec.hash != resolve("nano").hash


def test_a_spec_without_it_does_not_mention_it() -> None:
    spec = resolve("nano", overrides={"outer.optimizer": "sgd"})
    assert spec.hash == resolve("nano").hash
    assert "momentum" not in spec.canonical_json + to_toml(spec)
    assert "optimizer" not in spec.canonical_json + to_toml(spec)


@pytest.mark.parametrize("stages", [StageRange(0, 1), StageRange(1, 2)])
def test_momentum_takes_the_memory_of_one_copy_of_what_is_committed(stages: StageRange) -> None:
    usual = resolve("nano", overrides={"swarm.stages": 2})
    nesterov = resolve("nano", overrides={"swarm.stages": 2, "outer.optimizer": "nesterov"})
    parameters = sum(usual.parameters_of(stage) for stage in stages)
    followed = usual.model.vocabulary * usual.model.width if stages.first else 0
    more = memory_needed(nesterov, stages, 2, "cpu") - memory_needed(usual, stages, 2, "cpu")
    assert more == 4 * (parameters + followed)
    assert memory_needed(nesterov, stages, 2, "cuda") == memory_needed(usual, stages, 2, "cuda")


def test_given_values_win_over_the_defaults_of_nesterov() -> None:
    overrides = {"outer.optimizer": "nesterov", "outer.learning_rate": 1.0, "outer.momentum": 0.5}
    assert resolve("nano", overrides=overrides).outer.momentum == 0.5
    assert resolve("nano", overrides=overrides).outer.learning_rate == 1.0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"outer.momentum": 0.9}, "optimizer 'sgd' has none"),
        ({"outer.optimizer": "nesterov", "outer.momentum": 1.0}, "outer.momentum"),
        ({"outer.optimizer": "adam"}, "outer.optimizer"),
    ],
)
def test_what_cannot_be_is_refused(overrides: dict[str, object], message: str) -> None:
    with pytest.raises(HetnodeError, match=message) as caught:
        resolve("nano", overrides=overrides)
    assert caught.value.code is ErrorCode.BAD_SPEC
