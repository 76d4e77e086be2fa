"""Writing an export or an import: all of it or nothing, and no path of this machine."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from node.checkpoint import global_model
from node.hugging_face.card import CardFacts, card
from node.hugging_face.export import NOTHING_MEASURED, export, spec_without_folders
from node.hugging_face.weights import DTYPES
from protocol.errors import ErrorCode, HetnodeError
from protocol.run_files.resolve import resolve
from protocol.spec.data import DataSpec
from tests.support.hugging_face import GB, imported
from tests.support.models import PLAIN, random_model


def test_an_earlier_export_is_replaced_and_nothing_else(run: Path, folder: Path, tmp_path: Path) -> None:
    before = sorted(path.name for path in folder.iterdir())
    export(global_model.verify(run), folder, DTYPES["bf16"], GB)
    assert sorted(path.name for path in folder.iterdir()) != before, "one file now"
    (folder / "thesis.tex").write_text("precious")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("{}")
    (tmp_path / "file").touch()
    for place in (folder, tmp_path / "other", tmp_path / "file"):
        with pytest.raises(HetnodeError) as caught:
            export(global_model.verify(run), place, DTYPES["fp32"], GB)
        assert caught.value.code is ErrorCode.BAD_OPTION
    assert (folder / "thesis.tex").read_text() == "precious"


def test_a_full_disk_leaves_the_earlier_export(
    run: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    real = os.fsync
    calls = iter(range(100))

    def full(descriptor: int) -> None:
        if next(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(HetnodeError) as caught:
        export(global_model.verify(run), folder, DTYPES["fp32"], 50_000)
    assert caught.value.code is ErrorCode.DISK_FULL
    assert "checkpoint" not in str(caught.value)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_full_disk_leaves_nothing_of_an_import(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(HetnodeError) as caught:
        imported(folder, tmp_path / "new")
    assert caught.value.code is ErrorCode.DISK_FULL
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_folder_that_cannot_be_written_is_named(folder: Path, run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    place = tmp_path / "file" / "below"
    for attempt in (
        lambda: export(global_model.verify(run), place, DTYPES["fp32"], GB),
        lambda: imported(folder, place),
    ):
        with pytest.raises(HetnodeError, match="below cannot be written") as caught:
            attempt()
        assert caught.value.code is ErrorCode.BAD_OPTION


@pytest.mark.parametrize("path", ["/home/jo/book.txt", "C:\\Users\\jo\\book.txt", "D:/own\\book.txt"])
def test_a_card_tells_no_path_of_any_system(path: str) -> None:
    spec = resolve("nano", overrides={"data.source": f"text:{path}", "data.tokenizer": path})
    data = spec_without_folders(spec)["data"]
    assert (data["source"], data["tokenizer"]) == ("text:book.txt", "book.txt")


def test_a_set_on_the_hub_keeps_its_name_and_a_local_folder_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the form of its path: nobody else can find the data by it, and the hub has others so named."""
    monkeypatch.chdir(tmp_path)
    for folder in ("own/set", "corpus.d"):
        Path(folder).mkdir(parents=True)
    public = {"hf:owner/set/en": "owner/set", "hf:dclm": "mlfoundations/dclm-baseline-1.0-parquet"}
    local = ("hf:C:\\own\\set", "hf:./own/set", "hf:own/set", "hf:corpus", "text:own/set", "jsonl:corpus.d")
    for source in (*public, *local):
        spec = resolve("nano", overrides={"data.source": source})
        data = DataSpec.model_validate(spec_without_folders(spec)["data"])
        text = card(CardFacts(spec, data, 1, "float32", NOTHING_MEASURED))
        if source in public:
            assert data.source == source
            assert f"datasets:\n- {public[source]}\n" in text
        else:
            assert data.source == f"{source.partition(':')[0]}:local"
            assert "datasets:" not in text
            assert "| data | a folder that is not public |" in text


def test_values_that_a_dtype_cannot_hold_are_refused(tmp_path: Path) -> None:
    stages = random_model(PLAIN)
    stages[1]["head"][0, 0] = 1e5
    global_model.write(tmp_path / "run", PLAIN, 1, stages)
    with pytest.raises(HetnodeError, match="lm_head") as caught:
        export(global_model.verify(tmp_path / "run"), tmp_path / "hf", DTYPES["fp16"], GB)
    assert caught.value.code is ErrorCode.BAD_OPTION
    assert not (tmp_path / "hf").exists()


def test_a_checkpoint_that_lacks_a_stage_is_not_exported(tmp_path: Path) -> None:
    global_model.write(tmp_path / "part", PLAIN, 1, {1: random_model(PLAIN)[1]})
    with pytest.raises(HetnodeError, match="stage 0") as caught:
        export(global_model.verify(tmp_path / "part"), tmp_path / "hf", DTYPES["fp32"], GB)
    assert caught.value.code is ErrorCode.CHECKPOINT_MISSING
