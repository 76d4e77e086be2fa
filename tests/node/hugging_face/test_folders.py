"""A model that was exported comes back bit for bit, and is the start of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from node.checkpoint import global_model
from node.checkpoint.initial import initial_from, require_initial
from node.core.worker.compute import Compute
from node.core.worker.factories import TrainerFactories
from node.data.stream import open_stream
from node.experiment.evaluate import ForwardMode, evaluate
from node.experiment.in_process_replica import LocalReplica, plan_of
from node.hugging_face import importing
from node.hugging_face.export import export
from node.hugging_face.importing import import_model, inspect, tokenizer_of
from node.hugging_face.weights import DTYPES
from protocol.errors import ErrorCode, HetnodeError
from protocol.run_files.resolve import resolve
from protocol.spec.run import RunSpec
from tests.support.hugging_face import GB, assert_equal, imported, stages_of, wanted_spec
from tests.support.models import PLAIN, random_model, write_model


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_what_was_exported_comes_back_bit_for_bit(
    folder: Path, run: Path, tmp_path: Path, stages: int
) -> None:
    spec = imported(folder, tmp_path / "new", **{"swarm.stages": stages, "swarm.pipelines": 0})
    assert spec.model == PLAIN.model
    assert tokenizer_of(inspect(folder)) is None, "the tokenizer of bytes is known by name"
    assert resolve(file=tmp_path / "new" / "run.toml") == spec
    assert_equal(stages_of(tmp_path / "new" / "checkpoint"), stages_of(run))


def test_a_replica_starts_where_the_imported_model_stands(folder: Path, tmp_path: Path) -> None:
    spec = imported(folder, tmp_path / "new")
    parts = TrainerFactories(initial=initial_from(tmp_path / "new"))
    model = global_model.read(tmp_path / "new" / "checkpoint")
    stream = open_stream(spec)
    for replica, mode in zip(
        plan_of(spec).replicas, (ForwardMode.UNCOMPRESSED, ForwardMode.COMPRESSED), strict=True
    ):
        began = LocalReplica(spec, replica, Compute(), stream, parts).validate()
        found = evaluate(model, "builtin", mode=mode, batches=spec.data.validation_batches)
        assert found.loss == pytest.approx(began, rel=1e-5)


def test_a_run_cannot_start_without_the_parameters_that_it_names(folder: Path, tmp_path: Path) -> None:
    spec = imported(folder, tmp_path / "new")
    imported(folder, tmp_path / "other", **{"swarm.stages": 3})
    global_model.write(tmp_path / "foreign", PLAIN, 0, random_model(PLAIN, seed=1))
    require_initial(spec, tmp_path / "new")
    for place in (None, tmp_path / "other", tmp_path / "foreign"):
        for attempt in (lambda: require_initial(spec, place), lambda: initial_from(place)(spec, 1)):  # noqa: B023
            with pytest.raises(HetnodeError) as caught:
                attempt()
            assert caught.value.code is ErrorCode.INITIAL_UNAVAILABLE
    with pytest.raises(HetnodeError) as caught:
        require_initial(spec, tmp_path / "nothing")
    assert caught.value.code is ErrorCode.CHECKPOINT_MISSING


def test_the_same_parameters_are_accepted_from_any_folder(folder: Path, run: Path, tmp_path: Path) -> None:
    spec = imported(folder, tmp_path / "new")
    require_initial(spec, run)


def test_digests_are_part_of_the_specification_and_change_no_other_run(folder: Path, tmp_path: Path) -> None:
    wanted = wanted_spec(folder)
    spec = imported(folder, tmp_path / "new")
    assert spec.hash != wanted.hash
    assert "initial" not in json.loads(wanted.canonical_json)
    assert RunSpec.from_json(spec.canonical_json) == spec
    with pytest.raises(HetnodeError, match="initial") as caught:
        resolve(file=tmp_path / "new" / "run.toml", overrides={"swarm.stages": 3})
    assert caught.value.code is ErrorCode.BAD_SPEC


def test_only_the_same_model_can_be_imported_again_for_a_run(folder: Path, tmp_path: Path) -> None:
    spec = imported(folder, tmp_path / "new")
    assert import_model(inspect(folder), spec, tmp_path / "again") == spec
    export(
        global_model.verify(write_model(tmp_path, wanted_spec(folder))), tmp_path / "hf2", DTYPES["bf16"], GB
    )
    with pytest.raises(HetnodeError) as caught:
        import_model(inspect(tmp_path / "hf2"), spec, tmp_path / "third")
    assert caught.value.code is ErrorCode.INITIAL_UNAVAILABLE
    assert not (tmp_path / "third").exists()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_narrow_weights_are_widened_exactly(run: Path, tmp_path: Path, dtype: str) -> None:
    export(global_model.verify(run), tmp_path / "hf", DTYPES[dtype], GB)
    imported(tmp_path / "hf", tmp_path / "new")
    rounded = {
        stage: {name: tensor.to(DTYPES[dtype].torch).float() for name, tensor in tensors.items()}
        for stage, tensors in stages_of(run).items()
    }
    assert_equal(stages_of(tmp_path / "new" / "checkpoint"), rounded)


def test_a_tokenizer_that_is_too_large_is_not_cut(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importing, "TOKENIZER_LIMIT", 100)
    with pytest.raises(HetnodeError, match="larger than 100 bytes") as caught:
        tokenizer_of(inspect(folder))
    assert caught.value.code is ErrorCode.TOKENIZER_UNREADABLE
