"""The outer optimizer in a run's specification: one line of a run file, and no byte where it is not used."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.placement.cost_model import memory_needed, stage_parameters
from protocol.errors import ErrorCode, HetnodeError
from protocol.spec.resolve import resolve
from protocol.spec.run import RunSpec
from protocol.types import StageRange


def test_nesterov_is_one_line_of_the_run_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[outer]\noptimizer = "nesterov"\n')
    spec = resolve("nano", file)
    assert (spec.outer.optimizer, spec.outer.momentum, spec.outer.learning_rate) == ("nesterov", 0.9, 0.7)
    assert RunSpec.from_json(spec.canonical_json) == spec
    file.write_text(spec.toml)
    assert resolve(file=file) == spec
    assert spec.hash != resolve("nano").hash


def test_a_spec_without_it_does_not_mention_it() -> None:
    spec = resolve("nano", overrides={"outer.optimizer": "sgd"})
    assert spec.hash == resolve("nano").hash
    assert "momentum" not in spec.canonical_json + spec.toml
    assert "optimizer" not in spec.canonical_json + spec.toml


def test_robust_weighting_is_another_run_and_the_assigned_one_is_not_mentioned() -> None:
    usual, robust = (
        resolve("nano", overrides={"outer.weighting": weighting}) for weighting in ("assigned", "robust")
    )
    assert usual.hash == resolve("nano").hash != robust.hash
    assert "weighting" not in usual.canonical_json
    assert RunSpec.from_json(robust.canonical_json) == robust


@pytest.mark.parametrize("stages", [StageRange(0, 1), StageRange(1, 2)])
def test_momentum_takes_the_memory_of_one_copy_of_what_is_committed(stages: StageRange) -> None:
    usual = resolve("nano", overrides={"swarm.stages": 2})
    nesterov = resolve("nano", overrides={"swarm.stages": 2, "outer.optimizer": "nesterov"})
    parameters = sum(stage_parameters(usual, stage) for stage in stages)
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
        ({"outer.weighting": "robust", "outer.exchange": "reduced"}, "weighting 'robust' needs exchange"),
        ({"outer.top_k": 0, "outer.dense_every": 2}, "every round dense"),
        ({"outer.top_k": 0, "outer.selection": "random"}, "needs a top_k"),
        ({"outer.dense_quantizer": "2bit"}, "set dense_every"),
        ({"outer.dense_every": 2, "outer.dense_quantizer": "int9"}, "outer.dense_quantizer"),
        ({"outer.dense_every": -1}, "outer.dense_every"),
        ({"outer.selection": "smallest"}, "outer.selection"),
        ({"outer.exchange": "reduced", "outer.dense_every": 2}, "no dense_every"),
        ({"outer.exchange": "reduced", "outer.selection": "random"}, "selection 'largest'"),
    ],
)
def test_what_cannot_be_is_refused(overrides: dict[str, object], message: str) -> None:
    with pytest.raises(HetnodeError, match=message) as caught:
        resolve("nano", overrides=overrides)
    assert caught.value.code is ErrorCode.BAD_SPEC


@pytest.mark.parametrize(
    "options",
    [
        {"outer.selection": "random"},
        {"outer.dense_every": 5},
        {"outer.dense_every": 5, "outer.dense_quantizer": "1bit"},
        {"outer.top_k": 0, "outer.dense_quantizer": "2bit"},
    ],
    ids=str,
)
def test_what_is_sent_in_which_round_is_part_of_the_specification(
    options: dict[str, object], tmp_path: Path
) -> None:
    spec = resolve("nano", overrides=options)
    assert spec.hash != resolve("nano").hash
    assert RunSpec.from_json(spec.canonical_json) == spec
    file = tmp_path / "run.toml"
    file.write_text(spec.toml)
    assert resolve(file=file) == spec


def test_the_usual_selection_in_all_rounds_keeps_the_hash_of_former_specifications() -> None:
    usual = {"outer.selection": "largest", "outer.dense_every": 0}
    spec = resolve("nano", overrides=usual)
    assert spec.hash == resolve("nano").hash
    assert not any(word in spec.canonical_json for word in ("selection", "dense"))


def test_every_so_many_th_round_is_dense() -> None:
    outer = resolve("nano", overrides={"outer.dense_every": 3, "outer.selection": "random"}).outer
    dense = [number for number in range(1, 10) if outer.of_round(number).dense]
    assert dense == [number for number in range(1, 10) if outer.is_dense_in(number)] == [3, 6, 9]
    assert outer.of_round(4) == outer
    assert outer.of_round(3).value_quantizer == outer.quantizer == "2bit"
    assert not outer.of_round(3).is_masked
    usual = resolve("nano").outer
    assert all(usual.of_round(number) == usual for number in range(1, 10))


def test_large_tables_of_indices_are_no_obstacle_where_none_are_sent() -> None:
    many = {"outer.chunk": 65536, "outer.top_k": 8192, "outer.indices": "enumerative"}
    with pytest.raises(HetnodeError, match="enumerative"):
        resolve("nano", overrides=many)
    assert resolve("nano", overrides={**many, "outer.selection": "random"}).outer.is_masked
