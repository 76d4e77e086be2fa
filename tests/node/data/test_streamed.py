"""A stream of shards finds any sample without reading what comes before it, and names what is wrong."""

from __future__ import annotations

import gzip
import json
import logging
import shutil
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.data.stream import open_stream
from node.data.streamed import SLICE, Pass, ShardReader, StreamedSplit, order_of, turns_of
from node.data.tokenizer import Tokens
from protocol.errors import ErrorCode, HetnodeError
from protocol.run_files.resolve import resolve
from protocol.spec.run import RunSpec

CONTEXT = 4


class Shards:
    """Shards of documents of 10 tokens, each token of another value. Counts what is read."""

    def __init__(self, documents: list[int]) -> None:
        self.documents = documents
        self.opened: Counter[int] = Counter()
        self.rows = 0

    def split(self, seed: int = 0, nbytes: list[int | None] | None = None) -> StreamedSplit:
        shards = [partial(ShardReader, self._shard(index)) for index in range(len(self.documents))]
        return StreamedSplit(shards, nbytes or [None] * len(shards), CONTEXT, seed, "x")

    def _shard(self, index: int) -> Pass:
        def one_pass() -> Iterator[Tokens]:
            self.opened[index] += 1
            for row in range(self.documents[index]):
                self.rows += 1
                yield np.arange(10, dtype=np.int32) + 10 * row + 10**6 * index

        return one_pass


@settings(max_examples=25)
@given(
    documents=st.lists(st.integers(0, 1500), min_size=1, max_size=5).filter(any),
    seed=st.integers(0, 3),
    reads=st.lists(st.tuples(st.integers(0, 8 * SLICE), st.integers(1, 3)), min_size=1, max_size=4),
)
def test_a_sample_depends_on_its_ordinal_and_on_nothing_read_before(
    documents: list[int], seed: int, reads: list[tuple[int, int]]
) -> None:
    split = Shards(documents).split(seed)
    for start, count in reads:
        fresh = Shards(documents).split(seed).read(range(start, start + count))
        np.testing.assert_array_equal(split.read(range(start, start + count)), fresh)
        assert (fresh[:, :-1] + 1 == fresh[:, 1:]).all(), "a window is of one shard"


def test_a_start_in_the_middle_opens_one_shard_and_reads_one_slice() -> None:
    windows_of_row = 10 / CONTEXT
    shards = Shards([10_000] * 400)
    shards.split().read(range(300 * SLICE + 5, 300 * SLICE + 37))
    assert shards.opened.total() == 1
    assert shards.rows <= (SLICE + 10) / windows_of_row
    again = Shards([10_000] * 400)
    again.split().read(range(1000 * SLICE, 1000 * SLICE + 32))
    assert again.opened.total() == 1
    assert again.rows <= (3 * SLICE + 10) / windows_of_row, "with the slices of two earlier passes"


def test_one_pass_over_the_shards_takes_the_same_slice_of_each() -> None:
    windows = Shards([3000] * 5).split(seed=3).read(range(5 * SLICE))
    of_shard = windows[:, 0] // 10**6
    order = [set(of_shard[turn * SLICE : (turn + 1) * SLICE].tolist()) for turn in range(5)]
    assert sorted(map(min, order)) == list(range(5))
    assert [len(each) for each in order] == [1] * 5
    assert order != [{shard} for shard in range(5)], "the order depends on the seed"
    assert set((windows[:, 0] % 10**6).tolist()) == set(range(0, SLICE * CONTEXT, CONTEXT))


def test_the_windows_of_a_slice_are_shuffled_and_each_is_there_once() -> None:
    windows = Shards([2000]).split(seed=1).read(range(4 * SLICE + 903))
    firsts = windows[:, 0].tolist()
    for number in range(4):
        found = firsts[number * SLICE : (number + 1) * SLICE]
        expected = list(range(number * SLICE * CONTEXT, (number + 1) * SLICE * CONTEXT, CONTEXT))
        assert sorted(found) == expected != found
    assert sorted(firsts) == list(range(0, 4999 * CONTEXT, CONTEXT)), "a short slice, too"


def test_a_large_shard_has_turns_by_its_bytes_in_ascending_order() -> None:
    """Sizes of 1, 5 and 2 units: of one pass each shard gives as much as it has, so all end together."""
    documents = [410, 5 * 410, 2 * 410]
    unit = 2**26
    split = Shards(documents).split(seed=2, nbytes=[unit - 5, 5 * unit, unit + 1])
    windows = split.read(range(8 * SLICE))
    assert Counter((windows[:, 0] // 10**6).tolist()) == {0: SLICE, 1: 5 * SLICE, 2: 2 * SLICE}
    assert len(np.unique(windows, axis=0)) == len(windows)
    turns = [(row[0] // 10**6, row[0] % 10**6) for row in windows[::SLICE].tolist()]
    of_largest = [at // (SLICE * CONTEXT) for shard, at in turns if shard == 1]
    assert of_largest == [0, 1, 2, 3, 4]
    assert [shard for shard, _ in turns] != sorted(shard for shard, _ in turns), "turns are spread"


@given(nbytes=st.lists(st.none() | st.integers(0, 2**60), max_size=20), seed=st.integers(0, 3))
def test_every_pass_has_the_turns_of_all_shards_whatever_sizes_a_hub_tells(
    nbytes: list[int | None], seed: int
) -> None:
    turns = turns_of(nbytes)
    assert len(turns) == len(nbytes)
    assert sum(turns) <= 2**16 + len(nbytes)
    order = order_of(turns, seed, 1)
    assert sorted(order) == [(shard, rank) for shard, count in enumerate(turns) for rank in range(count)]
    for shard in range(len(turns)):
        ranks = [rank for each, rank in order if each == shard]
        assert ranks == sorted(ranks)


def test_shards_without_a_window_are_passed_over() -> None:
    only = Shards([0, 0, 300, 0]).split()
    for turn in range(5):
        windows = only.read(range(turn * SLICE, turn * SLICE + 3))
        assert set((windows // 10**6).ravel().tolist()) == {2}
    with pytest.raises(HetnodeError) as caught:
        Shards([0, 0]).split().read([0])
    assert caught.value.code is ErrorCode.DATA_TOO_SMALL


def test_a_shard_that_ends_is_used_again_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    split = Shards([8]).split()
    with caplog.at_level(logging.WARNING):
        first = split.read(range(19))
        assert not caplog.records
        rest = split.read(range(19, 40))
    for again in (rest[:19], split.read(range(38, 57))):
        assert sorted(again[:, 0].tolist()) == sorted(first[:, 0].tolist())
        assert (again != first).any(), "in another order"
    assert [record.getMessage() for record in caplog.records] == [
        "the x ends after 19 samples; they are used again"
    ]


def _write(path: Path, first: int, count: int = 400) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") as file:
        file.writelines(
            json.dumps({"text": f"document {n:06d} " * 2, "url": "u"}) + "\n"
            for n in range(first, first + count)
        )


def _file(shard: int) -> str:
    return f"c4-train.{shard:05d}-of-00006.json.gz"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Six shards, each longer than a slice, of a source too large to be counted."""
    monkeypatch.setattr("node.data.stream.LARGE", 0)
    for shard in range(6):
        _write(tmp_path / "data" / _file(shard), 10_000 * shard)
    return tmp_path / "data"


def _spec(folder: Path, **overrides: object) -> RunSpec:
    return resolve("nano", overrides={"data.source": f"hf:{folder}", "model.context": 8, **overrides})


def _shard_of(windows: np.ndarray) -> int:
    """The shard of documents whose numbers stand in windows of bytes."""
    text = "".join(bytes(window[:-1].astype(np.uint8)).decode() for window in windows)
    numbers = [int(word) for word in text.split() if len(word) == 6 and word.isdigit()]
    (shard,) = {number // 10_000 for number in numbers}
    return shard


def test_a_node_that_starts_late_opens_only_the_shards_of_its_samples(folder: Path, tmp_path: Path) -> None:
    """The other shards are no data at all: it would fail if it opened one of them."""
    whole = open_stream(_spec(folder))
    turns = [whole.read(range(turn * SLICE, turn * SLICE + 40)) for turn in range(6)]
    order = [_shard_of(windows) for windows in turns]
    assert sorted(order) == list(range(6))
    # A stream makes sure that both splits have a window: in the first shard of the order, and in shard 0.
    checked = {0, order[0]}
    late, never = [turn for turn in (5, 4, 3, 2) if order[turn] not in checked][:2]
    rest = tmp_path / "rest"
    shutil.copytree(folder, rest)
    for shard in set(range(6)) - checked - {order[late]}:
        (rest / _file(shard)).write_bytes(b"not even gzip")
    stream = open_stream(_spec(rest))
    np.testing.assert_array_equal(stream.read(range(late * SLICE, late * SLICE + 40)), turns[late])
    with pytest.raises(HetnodeError) as caught:
        stream.read([never * SLICE])
    assert caught.value.code is ErrorCode.DATA_UNREADABLE
    assert _file(order[never]) in caught.value.cause


@pytest.mark.parametrize("content", [b"", b"PAR1 and no more", None], ids=["empty", "corrupt", "missing"])
def test_a_shard_that_cannot_be_read_is_named(
    tmp_path: Path, content: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyarrow.parquet  # noqa: PLC0415  collecting the tests needs none of it

    monkeypatch.setattr("node.data.stream.LARGE", 0)
    files = [tmp_path / f"shard_{number:08d}_processed.parquet" for number in range(4)]
    for file in files:
        pyarrow.parquet.write_table(pyarrow.table({"text": ["some text " * 50] * 400}), file)
    stream = open_stream(_spec(tmp_path))
    for file in files:
        if content is None:
            file.unlink()
        else:
            file.write_bytes(content)
    with pytest.raises(HetnodeError) as caught:
        stream.read([SLICE])
    assert caught.value.code is ErrorCode.DATA_UNREADABLE
    assert any(file.name in caught.value.cause for file in files)
    assert "\n" not in caught.value.cause


def test_an_empty_shard_of_lines_is_passed_over(folder: Path) -> None:
    for shard in (0, 2, 3):
        _write(folder / _file(shard), 0, count=0)
    stream = open_stream(_spec(folder))
    found = {_shard_of(stream.read(range(turn * SLICE, turn * SLICE + 40))) for turn in range(6)}
    assert found == {1, 4, 5}


def test_a_column_that_is_not_there_is_named_with_those_that_are(folder: Path) -> None:
    with pytest.raises(HetnodeError) as caught:
        open_stream(_spec(folder, **{"data.text_field": "content"}))
    assert caught.value.code is ErrorCode.DATA_UNREADABLE
    assert "'content', its keys are text, url" in caught.value.cause


def test_a_broken_file_is_unreadable_again_and_again(folder: Path) -> None:
    """A failed pass must not be taken for the end of the data."""
    only = folder / _file(0)
    for number in range(1, 6):
        (folder / _file(number)).unlink()
    stream = open_stream(_spec(folder))
    first, whole = stream.read([0]), only.read_bytes()
    only.write_bytes(whole + gzip.compress(b'{"text": "cut'))
    for _ in range(2):
        with pytest.raises(HetnodeError) as caught:
            stream.read([10_000])
        assert caught.value.code is ErrorCode.DATA_UNREADABLE
    only.write_bytes(whole)
    np.testing.assert_array_equal(stream.read([0]), first)
