"""A run that starts from an imported model has its tokenizer and its parameters wherever it is used from."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer as RawTokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import CharDelimiterSplit
from typer.testing import CliRunner

from node.checkpoint import global_model
from node.cli.main import app
from node.data.tokenizer import check_tokenizer, find_tokenizer, pinned
from node.hugging_face.export import export
from node.hugging_face.importing import import_model, inspect
from node.hugging_face.weights import DTYPES
from node.ipc.worker_calls import Build, LocalData
from node.local_swarm import initial_of
from node.views.swarm import SwarmView
from node.worker.process import NodeWorker
from protocol.errors import ErrorCode, HetnodeError
from protocol.math.outer_step import anchor_digest
from protocol.run_files.resolve import resolve, to_toml
from protocol.spec.run import RunSpec
from protocol.types import StageRange
from tests.support.models import PLAIN, random_model, write_model


@pytest.fixture
def hugging_face(tmp_path: Path) -> Path:
    """The folder of a model with a tokenizer of words."""
    export(global_model.verify(write_model(tmp_path / "run", PLAIN)), tmp_path / "hf", DTYPES["fp32"], 10**9)
    words = WordLevel({"[UNK]": 0, "def": 1, "\n": 2}, unk_token="[UNK]")
    tokenizer = RawTokenizer(words)
    tokenizer.pre_tokenizer = CharDelimiterSplit("\n")  # else a document is one token
    tokenizer.save(str(tmp_path / "hf" / "tokenizer.json"))
    return tmp_path / "hf"


@pytest.fixture
def mine(hugging_face: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Such a model, imported; the working folder is another, which has a tokenizer of its own."""
    monkeypatch.chdir(tmp_path)
    _said("import", "hf", "--out", "mine", "--preset", "nano")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    Path("tokenizer.json").write_text("{}")
    return tmp_path / "mine"


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders of the swarms that have begun, whose processes are not started."""
    folders = list[Path]()

    def run(view: SwarmView, _: str) -> None:
        (view.folder / "run.toml").write_text(to_toml(view.spec))
        (view.folder / "nodes").mkdir(exist_ok=True)
        (view.folder / "coordinator.sqlite").touch()
        folders.append(view.folder)

    monkeypatch.setattr(SwarmView, "run", run)
    return folders


def _said(*arguments: str | Path) -> str:
    return str(CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False).stdout)


def _spec(mine: Path) -> RunSpec:
    return resolve(file=mine / "run.toml")


def _build(
    worker: NodeWorker, spec: RunSpec, stages: StageRange, initial: Path, search_paths: tuple[Path, ...] = ()
) -> list[str]:
    worker.build(Build(spec, stages, LocalData(initial=initial, search_paths=search_paths)))
    return [worker.trainer.outer[stage].digest() for stage in stages]


def test_the_model_is_used_from_any_folder(mine: Path) -> None:
    for place in (mine, mine / "checkpoint"):
        assert json.loads(_said("eval", place, "--batches", "1", "--json"))["tokens"] > 0
        assert _said("generate", place, "--tokens", "1").startswith("def ")
    _said("export", mine, "out")
    assert json.loads(Path("out/tokenizer.json").read_text())["model"]["vocab"]["def"] == 1


@pytest.mark.parametrize(
    ("declared", "named", "end"),
    [(3, "[STOP]", "[STOP]"), ([3, 4], "[STOP]", "[STOP]"), (4, "", "<|endoftext|>"), (5, "</s>", "</s>")],
)
def test_the_end_of_text_is_the_token_that_the_model_declares(
    tmp_path: Path, hugging_face: Path, declared: int | list[int], named: str, end: str
) -> None:
    """Whatever its name is, and whichever other tokens have usual names; an export declares it again."""
    ids = {"[UNK]": 0, "def": 1, "\n": 2, "[STOP]": 3, "<|endoftext|>": 4, "</s>": 5}
    RawTokenizer(WordLevel(ids, unk_token="[UNK]")).save(str(hugging_face / "tokenizer.json"))
    config = json.loads((hugging_face / "config.json").read_text())
    (hugging_face / "config.json").write_text(json.dumps({**config, "eos_token_id": declared}))
    _said("import", hugging_face, "--out", tmp_path / "mine", "--preset", "nano")
    spec = _spec(tmp_path / "mine")
    assert spec.data.end_token == named
    assert check_tokenizer(spec, str(tmp_path / "mine" / "tokenizer.json")).separator.tolist() == [ids[end]]
    _said("export", tmp_path / "mine", tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["eos_token_id"] == ids[end]
    assert json.loads((tmp_path / "back" / "tokenizer_config.json").read_text())["eos_token"] == end


def test_an_operator_hears_what_separates_documents_where_a_tokenizer_leaves_that_open(
    mine: Path, caplog: pytest.LogCaptureFixture
) -> None:
    words = WordLevel({"[UNK]": 0, "</s>": 1, "<eos>": 2, "[STOP]": 3}, unk_token="[UNK]")
    RawTokenizer(words).save("words.json")
    data = {"data.tokenizer": "words.json"}
    pinned(resolve("nano", overrides=data | {"data.end_token": "[STOP]"}))
    assert not caplog.messages
    pinned(resolve("nano", overrides=data))
    assert "followed by </s> (it also has <eos>)" in caplog.text
    with pytest.raises(HetnodeError, match=re.escape("it has no token '[END]'")):
        pinned(resolve("nano", overrides=data | {"data.end_token": "[END]"}))
    with pytest.raises(HetnodeError, match="the byte tokenizer has no end_token"):
        resolve("nano", overrides={"data.end_token": "[END]"})


def test_the_specification_does_not_tell_where_the_model_was_imported(mine: Path, tmp_path: Path) -> None:
    _said("import", tmp_path / "hf", "--out", tmp_path / "far" / "other", "--preset", "nano")
    assert _spec(tmp_path / "far" / "other") == _spec(mine)


def test_the_run_file_is_used_from_any_folder(mine: Path) -> None:
    spec = _spec(mine)
    assert pinned(spec, mine / "run.toml") == spec
    with pytest.raises(HetnodeError) as caught:
        pinned(spec)
    assert caught.value.code is ErrorCode.TOKENIZER_UNREADABLE


def test_a_file_with_another_hash_is_passed_over(mine: Path) -> None:
    data, kept = _spec(mine).data, str(mine / "tokenizer.json")
    assert find_tokenizer(data, Path(), None, mine) == kept
    assert find_tokenizer(data, Path()) is None
    assert find_tokenizer(data.model_copy(update={"tokenizer": kept})) == kept
    assert find_tokenizer(resolve("nano").data, mine) is None


def test_the_same_model_imported_for_a_run_has_the_runs_tokenizer(mine: Path, tmp_path: Path) -> None:
    _said("import", tmp_path / "hf", "--out", "again", "--config", mine / "run.toml")
    assert Path("again/tokenizer.json").read_bytes() == (mine / "tokenizer.json").read_bytes()


def test_a_tokenizer_that_is_named_at_the_import_is_kept_as_well(mine: Path, tmp_path: Path) -> None:
    theirs = shutil.copy(tmp_path / "hf" / "tokenizer.json", tmp_path / "words.json")
    _said(
        "import", tmp_path / "hf", "--out", "named", "--preset", "nano", "--set", f"data.tokenizer={theirs}"
    )
    assert _spec(Path("named")) == _spec(mine)
    assert Path("named/tokenizer.json").read_bytes() == Path(theirs).read_bytes()


def test_a_worker_finds_the_tokenizer_in_the_places_of_its_node(mine: Path) -> None:
    spec = _spec(mine)
    with pytest.raises(HetnodeError) as caught:
        _build(NodeWorker(), spec, StageRange(0, 1), mine)
    assert caught.value.code is ErrorCode.DATA_NOT_NAMED
    _build(NodeWorker(), spec, StageRange(0, 1), mine, search_paths=(mine,))


def test_a_swarm_keeps_the_tokenizer_in_its_folder_above_its_nodes(
    mine: Path, begun: list[Path], tmp_path: Path
) -> None:
    _said("swarm", "up", "--config", mine / "run.toml", "--folder", tmp_path / "swarm")
    assert begun == [tmp_path / "swarm"]
    found = find_tokenizer(_spec(mine).data, tmp_path / "swarm" / "nodes" / "00-replica")
    assert found == str(tmp_path / "swarm" / "tokenizer.json")


def test_a_swarm_goes_on_only_with_its_parameters_and_is_told_where_they_are_now(
    mine: Path, begun: list[Path], tmp_path: Path
) -> None:
    swarm, moved = tmp_path / "swarm", tmp_path / "moved"
    _said("swarm", "up", "--config", mine / "run.toml", "--folder", swarm)
    mine.rename(moved)
    foreign = tmp_path / "foreign"
    global_model.write(foreign, PLAIN, 0, random_model(PLAIN, seed=1))
    for more, code in (
        ([], ErrorCode.CHECKPOINT_MISSING),
        (["--config", foreign / "run.toml"], ErrorCode.INITIAL_UNAVAILABLE),
    ):
        with pytest.raises(HetnodeError) as caught:
            _said("swarm", "up", "--resume", swarm, *more)
        assert caught.value.code is code
    assert len(begun) == 1
    _said("swarm", "up", "--resume", swarm, "--config", moved / "run.toml")
    _said("swarm", "up", "--resume", swarm, "--config", initial_of(swarm) / "run.toml")
    _said("swarm", "up", "--resume", swarm)
    assert len(begun) == 4
    assert initial_of(swarm).resolve() == moved


def test_a_worker_starts_from_the_given_parameters_and_comes_back_to_them(tmp_path: Path) -> None:
    model = write_model(tmp_path / "run", PLAIN, round_number=0)
    export(global_model.verify(model), tmp_path / "bytes", DTYPES["fp32"], 10**9)
    spec = import_model(inspect(tmp_path / "bytes"), PLAIN, tmp_path / "mine")
    assert spec.initial == tuple(anchor_digest(stage) for stage in random_model(PLAIN).values())
    worker = NodeWorker()
    assert _build(worker, spec, StageRange(0, 2), tmp_path / "mine") == list(spec.initial)
    trainer = worker.trainer
    for stage, digest in enumerate(spec.initial):
        with torch.no_grad():
            for parameter in trainer.modules[stage].parameters():
                parameter.add_(0.1)
        payload = trainer.outer.propose(stage)
        assert payload is not None
        assert trainer.commit(stage, 1, [(payload, 1.0)], mine_included=True) != digest
    trainer.load_initial()
    assert [trainer.outer[stage].digest() for stage in range(2)] == list(spec.initial)
    assert trainer.outer.rounds == {0: 0, 1: 0}
    last = NodeWorker()
    assert _build(last, spec, StageRange(1, 2), tmp_path / "mine") == [spec.initial[1]]
    assert torch.equal(last.trainer.outer.embedding, random_model(PLAIN)[0]["emb"])
