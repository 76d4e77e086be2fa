"""A run of somebody else opens no path of this machine that its owner has not named."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from node.data.hub import Shard, hub_shards, is_hub_name
from node.data.sources import names_files, open_source
from node.data.stream import open_stream
from node.data.tokenizer import find_tokenizer, load_tokenizer
from protocol.errors import ErrorCode, HetnodeError
from protocol.run_files.resolve import resolve
from protocol.spec.data import DataSpec
from protocol.spec.run import RunSpec


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    """Whoever opens a pipe for reading waits for a writer: a test that reads one does not end."""
    os.mkfifo(tmp_path / "secret.txt")
    return tmp_path / "secret.txt"


def spec_of(**data: Any) -> RunSpec:
    return resolve("nano", overrides={f"data.{key}": value for key, value in data.items()})


def code_of(spec: RunSpec, **own: Any) -> ErrorCode:
    with pytest.raises(HetnodeError) as caught:
        open_stream(spec, **own, is_own_run=False)
    return caught.value.code


def corpus(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    for name, suffix in (("a", "txt"), ("b", "txt"), ("train", "jsonl")):
        text = "".join(f"{name} line {line}\n" for line in range(2000))
        (folder / f"{name}.{suffix}").write_text(json.dumps({"text": text}) if suffix == "jsonl" else text)
    return folder


@pytest.mark.parametrize("form", ["text:{}", "jsonl:{}", "hf:{}"])
def test_a_path_in_the_specification_is_refused_before_it_is_read(form: str, pipe: Path) -> None:
    assert code_of(spec_of(source=form.format(pipe))) is ErrorCode.DATA_NOT_NAMED


@pytest.mark.parametrize("name", ["text", "json", "parquet", "csv", "arrow", "./x", "../x/y", "~/x", "/x/y"])
def test_names_for_files_of_the_current_folder_are_no_names_of_the_hub(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(corpus(tmp_path / "home"))
    assert names_files(f"hf:{name}")
    assert code_of(spec_of(source=f"hf:{name}")) is ErrorCode.DATA_NOT_NAMED


def test_a_folder_that_looks_like_a_name_of_the_hub_is_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_hub_name("owner/name")
    assert is_hub_name("owner/name/config")
    assert is_hub_name("c4")
    corpus(tmp_path / "owner").rename(tmp_path / "name")
    (tmp_path / "owner").mkdir()
    (tmp_path / "name").rename(tmp_path / "owner" / "name")
    monkeypatch.chdir(tmp_path)
    assert not is_hub_name("owner/name")
    assert not is_hub_name("owner/name/config")


def test_a_data_set_that_lists_files_of_this_machine_is_refused(tmp_path: Path) -> None:
    """A folder stands for a data set of the hub whose page names local files."""
    pytest.importorskip("datasets")
    folder = str(corpus(tmp_path / "home"))
    assert hub_shards(folder)
    with pytest.raises(HetnodeError, match="not on the hub"):
        hub_shards(folder, may_open_files=False)


def test_what_the_owner_names_is_opened(tmp_path: Path, pipe: Path) -> None:
    own = f"text:{corpus(tmp_path / 'home')}"
    opened = open_stream(spec_of(source=f"text:{pipe}"), own=[own], is_own_run=False)
    assert opened.read(range(2)).shape[0] == 2


def test_what_is_built_in_needs_no_owner() -> None:
    assert open_stream(spec_of(), is_own_run=False).read(range(1)).shape[0] == 1


def test_a_tokenizer_is_found_by_its_hash_in_own_folders_alone(tmp_path: Path, pipe: Path) -> None:
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    (tmp_path / "own").mkdir()
    inner.save(str(tmp_path / "own" / "tokenizer.json"))
    inner.save(str(tmp_path / "there.json"))
    sha256 = load_tokenizer(DataSpec(tokenizer=str(tmp_path / "there.json"))).sha256
    data = DataSpec(tokenizer=str(tmp_path / "there.json"), tokenizer_sha256=sha256)
    assert find_tokenizer(data) == str(tmp_path / "there.json")
    assert find_tokenizer(data, is_own_run=False) is None
    found = find_tokenizer(data, tmp_path / "own", is_own_run=False)
    assert found == str(tmp_path / "own" / "tokenizer.json")
    assert code_of(spec_of(tokenizer=str(pipe))) is ErrorCode.DATA_NOT_NAMED


@pytest.mark.parametrize("kind", ["text", "jsonl"])
def test_a_device_or_a_pipe_is_no_file_even_for_its_owner(kind: str, pipe: Path) -> None:
    for path in (pipe, Path("/dev/zero")):
        with pytest.raises(HetnodeError) as caught:
            list(open_source(f"{kind}:{path}", "text").documents())
        assert caught.value.code is ErrorCode.DATA_UNREADABLE
    with pytest.raises(HetnodeError) as caught:
        load_tokenizer(DataSpec(tokenizer=str(pipe)))
    assert caught.value.code is ErrorCode.TOKENIZER_UNREADABLE


def refused(source: str, most_bytes: int = 2**28) -> str:
    """The cause with which reading `source` is refused, within this memory."""
    tracemalloc.start()
    try:
        with pytest.raises(HetnodeError) as caught:
            for _ in open_source(source, "text").documents():
                pass
        assert tracemalloc.get_traced_memory()[1] < most_bytes
    finally:
        tracemalloc.stop()
    assert caught.value.code is ErrorCode.DATA_UNREADABLE
    return caught.value.cause


def sparse(path: Path, nbytes: int) -> Path:
    with path.open("wb") as file:
        file.truncate(nbytes)
    return path


@pytest.mark.parametrize("kind", ["text", "jsonl"])
def test_of_a_huge_file_that_is_no_text_the_beginning_is_read(kind: str, tmp_path: Path) -> None:
    file = sparse(tmp_path / "huge", 2**40)
    assert str(file) in refused(f"{kind}:{file}")


def test_an_endless_line_is_refused_within_bounded_memory(tmp_path: Path) -> None:
    file = sparse(tmp_path / "line.jsonl", 10 * 2**30)
    assert "line 1" in (cause := refused(f"jsonl:{file}"))
    assert "64 MiB" in cause


def test_a_pipe_in_a_folder_of_files_is_passed_over(tmp_path: Path) -> None:
    os.mkfifo(corpus(tmp_path / "home") / "c.txt")
    assert len(list(open_source(f"text:{tmp_path / 'home'}", "text").documents())) > 2


def test_a_record_of_the_hub_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    shard = Shard("endless", lambda: iter([{"text": "y" * (2**26 + 1)}]))
    monkeypatch.setattr("node.data.sources.hub_shards", lambda *_: [shard])
    assert "64 MiB" in refused("hf:owner/name")


@pytest.mark.parametrize("content", [b"{" * 2**20, b'{"model":' + b"[" * 2**20, b"\n\xff" * 2**20, b"{}"])
def test_a_file_that_is_no_tokenizer_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(HetnodeError) as caught:
        load_tokenizer(DataSpec(tokenizer=str(tmp_path / "tokenizer.json")))
    assert caught.value.code is ErrorCode.TOKENIZER_UNREADABLE


def test_a_huge_tokenizer_is_read_up_to_a_bound(tmp_path: Path) -> None:
    file = sparse(tmp_path / "tokenizer.json", 2**40)
    with pytest.raises(HetnodeError, match="more than 256 MiB"):
        load_tokenizer(DataSpec(tokenizer=str(file)))
