"""Short names of data sets, on local folders with the layout of the hub; no network takes part."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from node.data import hub
from node.data.hub import PRESETS, hub_shards
from node.data.sources import open_source
from node.data.stream import open_stream
from protocol.errors import ErrorCode, HetnodeError
from protocol.run_files.resolve import resolve


def _lines(name: str) -> bytes:
    records = ({"text": f"{name} {n}", "meta": {"pile_set_name": "x"}, "url": "u"} for n in range(250))
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def _dclm(folder: Path) -> list[str]:
    import pyarrow.parquet  # noqa: PLC0415  collecting the tests needs none of it

    below = "filtered/OH_eli5_vs_rw_v2_bigram_200k_train/fasttext_openhermes/processed_data"
    names = [f"{below}/global-shard_0{n}_of_10/local-shard_0_of_10/shard_{n:08d}.parquet" for n in (1, 2)]
    for name in names:
        (folder / name).parent.mkdir(parents=True)
        table = pyarrow.table({"text": [f"{name} {n}" for n in range(250)], "url": ["u"] * 250})
        pyarrow.parquet.write_table(table, folder / name, row_group_size=100)
    return names


def _c4(folder: Path) -> list[str]:
    for config in ("en", "realnewslike"):
        (folder / config).mkdir()
        for split, count in (("train", 2), ("validation", 1)):
            for n in range(count):
                name = f"{config}/c4-{split}.{n:05d}-of-{count:05d}.json.gz"
                (folder / name).write_bytes(gzip.compress(_lines(name)))
    configs = "".join(
        f"- config_name: {config}\n  data_files:\n"
        + "".join(f"  - split: {s}\n    path: {config}/c4-{s}.*.json.gz\n" for s in ("train", "validation"))
        for config in ("en", "realnewslike")
    )
    (folder / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    return [f"en/c4-train.{n:05d}-of-00002.json.gz" for n in range(2)]


def _pile(folder: Path) -> list[str]:
    names = ["train/00.jsonl.zst", "train/01.jsonl.zst"]
    (folder / "train").mkdir()
    for name in (*names, "val.jsonl.zst", "test.jsonl.zst"):
        (folder / name).write_bytes(zstandard.compress(_lines(name)))
    return names


LAYOUTS = {"dclm": _dclm, "c4": _c4, "pile": _pile}


@pytest.fixture(autouse=True)
def _caches_stay_in_a_temporary_folder(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))


def test_there_is_a_layout_for_each_short_name() -> None:
    assert set(LAYOUTS) == set(PRESETS)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_short_name_reads_the_training_files_of_its_configuration(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "copy"
    folder.mkdir()
    files = LAYOUTS[name](folder)
    # The only stand-in: the data set's address. A folder of the short name does not matter.
    monkeypatch.setattr(hub, "PRESETS", {name: (str(folder), PRESETS[name][1])})
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).mkdir()
    assert [shard.name for shard in hub_shards(name)] == [f"{name}, {Path(file).name}" for file in files]
    texts = [document.text for document in open_source(f"hf:{name}", "text").documents()]
    assert texts == [f"{file} {n}" for file in files for n in range(250)]
    spec = resolve("nano", overrides={"data.source": f"hf:{name}"})
    assert open_stream(spec).read(range(4)).shape == (4, spec.model.context + 1)


@pytest.mark.parametrize(("name", "below"), [("dclm", ""), ("c4", "en"), ("pile", "")])
def test_a_local_copy_gives_the_same_samples_as_the_short_name(
    name: str, below: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    LAYOUTS[name](tmp_path)
    monkeypatch.setattr(hub, "PRESETS", {name: (str(tmp_path), PRESETS[name][1])})
    spec = resolve("nano", overrides={"data.source": f"hf:{name}"})
    there = open_stream(spec).read(range(1000, 1100))
    here = open_stream(spec, own=[f"hf:{tmp_path / below}"]).read(range(1000, 1100))
    assert (there == here).all()


def _refused(read: Callable[[], object]) -> HetnodeError:
    with pytest.raises(HetnodeError) as caught:
        read()
    return caught.value


@pytest.mark.parametrize("name", [*PRESETS, "dclmm"])
def test_without_a_network_the_short_names_are_listed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    error = _refused(lambda: hub_shards(name))
    assert error.code is ErrorCode.DATA_UNREADABLE
    assert PRESETS.get(name, (name, None))[0] in error.cause
    assert "dclm, c4, pile" in error.remedy


def test_a_configuration_that_is_not_there_is_unreadable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _c4(tmp_path)
    monkeypatch.setattr(hub, "PRESETS", {"c4": (str(tmp_path), "enn")})
    error = _refused(lambda: hub_shards("c4"))
    assert error.code is ErrorCode.DATA_UNREADABLE
    assert "enn" in error.cause
