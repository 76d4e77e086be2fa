"""Files of data as people have them: packed, large, in other encodings and forms, with a few bad records."""

from __future__ import annotations

import gzip
import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from node.data.files import FilePart, not_utf8, opened, parts_of
from node.data.sources import open_source
from node.data.stream import is_streamed, open_stream
from protocol.errors import ErrorCode, HetnodeError
from protocol.run_files.resolve import resolve
from protocol.spec.run import RunSpec

PACK: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}
LINES = "".join(f"line {number} {'é' * (number % 7)}\n" for number in range(3000))


def texts(count: int = 60) -> list[str]:
    return [f"document {number} " * 20 for number in range(count)]


def lines(records: list[object]) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def jsonl(path: Path, records: list[object] | None = None) -> Path:
    path.write_bytes(lines(records or [{"text": text} for text in texts()]))
    return path


def parquet(path: Path, column: list[str | None], group: int = 10) -> Path:
    pyarrow.parquet.write_table(pyarrow.table({"text": column, "n": range(len(column))}), path, group)
    return path


def spec_of(source: object, **overrides: object) -> RunSpec:
    return resolve("nano", overrides={"data.source": str(source), "model.context": 31, **overrides})


def samples(source: object, count: int = 40) -> np.ndarray:
    stream = open_stream(spec_of(source))
    return np.concatenate([stream.read(range(count)), stream.validation(5)])


def read(source: object) -> list[str]:
    return [document.text for document in open_source(str(source), "text").documents()]


def refused(source: object) -> HetnodeError:
    with pytest.raises(HetnodeError) as caught:
        read(source)
    assert caught.value.code is ErrorCode.DATA_UNREADABLE
    return caught.value


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of more than 20 KB are large, and have small parts and blocks."""
    for place in ("sources.LARGE", "stream.LARGE"):
        monkeypatch.setattr(f"node.data.{place}", 20_000)
    monkeypatch.setattr("node.data.files.PART", 8_000)
    monkeypatch.setattr("node.data.records.PART", 8_000)
    monkeypatch.setattr("node.data.sources.LARGEST_BLOCK", 100)


@pytest.mark.parametrize("ending", PACK)
def test_packed_files_give_the_samples_of_plain_ones(tmp_path: Path, ending: str) -> None:
    contents = {"text": LINES.encode(), "jsonl": lines([{"text": text} for text in texts()])}
    for kind, content in contents.items():
        suffix = {"text": ".txt"}.get(kind, ".jsonl")
        plain, packed = tmp_path / f"plain-{kind}", tmp_path / f"packed-{kind}"
        for folder in (plain, packed):
            folder.mkdir()
        for name in ("a", "a.b", "a-b"):
            (plain / f"{name}{suffix}").write_bytes(content)
            (packed / f"{name}{suffix}{ending}").write_bytes(PACK[ending](content))
        np.testing.assert_array_equal(samples(f"{kind}:{packed}"), samples(f"{kind}:{plain}"))
        one = samples(f"{kind}:{packed / f'a{suffix}{ending}'}")
        np.testing.assert_array_equal(one, samples(f"{kind}:{plain / f'a{suffix}'}"))


@pytest.mark.parametrize("ending", PACK)
def test_what_is_packed_is_seen_by_its_first_bytes(tmp_path: Path, ending: str) -> None:
    half = len(LINES) // 2
    twice = PACK[ending](LINES[:half].encode()) + PACK[ending](LINES[half:].encode())
    (tmp_path / "packed.txt").write_bytes(twice)
    assert "".join(read(f"text:{tmp_path / 'packed.txt'}")) == LINES
    (tmp_path / f"plain.txt{ending}").write_text(LINES)
    assert "".join(read(f"text:{tmp_path / f'plain.txt{ending}'}")) == LINES


@pytest.mark.parametrize("ending", PACK)
def test_a_packed_file_that_is_damaged_is_named(tmp_path: Path, ending: str) -> None:
    content, file = PACK[ending](os.urandom(5000).hex().encode()), tmp_path / f"a.txt{ending}"
    for damaged in (content[:-9], content[:200] + bytes(100) + content[300:]):
        file.write_bytes(damaged)
        assert file.name in refused(f"text:{file}").cause


def bomb(path: Path, unit: bytes, count: int) -> Path:
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(count):
            file.write(unit)
    return path


def test_a_packed_file_that_expands_without_end_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.data.records.MOST_TEXT", 2**24)
    monkeypatch.setattr("node.data.stream.LARGE", 2**21)
    text = bomb(tmp_path / "a.txt.gz", b"some words \n" * 2**17, 30)
    records = bomb(tmp_path / "a.jsonl.gz", b'{"text": "%s"}\n' % (b"y" * 2**20), 30)
    for source in (f"text:{text}", f"jsonl:{records}"):
        with pytest.raises(HetnodeError, match="expand without end"):
            open_stream(spec_of(source))
    line = bomb(tmp_path / "line.jsonl.gz", b"y" * 2**24, 6)
    assert "64 MiB" in refused(f"jsonl:{line}").cause


def test_a_folder_names_what_it_leaves_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.txt").write_text("a" * 100)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"a" * 100))
    (tmp_path / "B.TXT").write_text("b" * 100)
    (tmp_path / "c.TXT.GZ").write_bytes(gzip.compress(b"c" * 100))
    (tmp_path / "below").mkdir()
    for number in range(6):
        (tmp_path / "below" / f"{number}.md").write_text("#")
    with caplog.at_level(logging.WARNING):
        assert [text[0] for text in read(f"text:{tmp_path}")] == ["b", "a", "c"]
    assert "7 other files are left out: a.txt.gz, below/0.md" in caplog.text
    assert "2 more" in caplog.text


def test_a_folder_of_other_files_is_refused_with_their_names(tmp_path: Path) -> None:
    parquet(tmp_path / "one.parquet", ["some text"])
    error = refused(f"text:{tmp_path}")
    assert "no .txt file but one.parquet" in error.cause
    assert f"parquet:{tmp_path}" in error.remedy
    assert "parquet:" in refused(f"text:{tmp_path / 'one.parquet'}").remedy


@pytest.mark.parametrize(
    ("content", "encoding"),
    [
        (LINES.encode("utf-16"), "UTF-16"),
        (LINES.encode("utf-32"), "UTF-32"),
        (LINES.encode("utf-16-le"), "UTF-16LE"),
        (LINES.encode("utf-16-be"), "UTF-16BE"),
        (b"plain words " * 3000 + "un caf\xe9".encode("latin-1"), "ISO-8859-1"),
        ("\u201cquoted\u201d \u20ac5 ".encode("cp1252") * 2000, "WINDOWS-1252"),
        (LINES.encode() + b"\xff" + LINES.encode(), "damaged"),
        (bytes(range(256)) * 100, "binary"),
        (bytes(10_000), "binary"),
    ],
)
@pytest.mark.parametrize("kind", ["text", "jsonl"])
def test_what_is_not_utf8_is_refused_with_the_encoding_that_it_seems_to_be(
    tmp_path: Path, kind: str, content: bytes, encoding: str
) -> None:
    (tmp_path / "a.txt").write_bytes(content.replace(b"\n", b"\n" if kind == "text" else b" "))
    error = refused(f"{kind}:{tmp_path / 'a.txt'}")
    assert encoding in error.cause
    assert ("iconv" in error.remedy) == (encoding != "binary")


def test_a_form_of_json_without_one_record_a_line_is_recognized(tmp_path: Path) -> None:
    records = [{"text": text} for text in texts()]
    file = tmp_path / "a.json"
    for indent in (None, 1):
        file.write_text(json.dumps(records, indent=indent))
        error = refused(f"jsonl:{file}")
        assert "JSON array" in error.cause
        assert "jq -c '.[]'" in error.remedy
    file.write_text("\n".join(json.dumps(record, indent=2) for record in records))
    assert "pretty-printed" in refused(f"jsonl:{file}").cause
    file.write_bytes(b"\xef\xbb\xbf" + lines(list(records)))
    assert len(read(f"jsonl:{file}")) == len(records)


@pytest.mark.parametrize(
    ("given_source", "meant"),
    [
        ("good.txt", "text:good.txt"),
        ("./Corpus.TXT.gz", "text:./Corpus.TXT.gz"),
        ("/x/train.jsonl.zst", "jsonl:/x/train.jsonl.zst"),
        ("data/a.parquet", "parquet:data/a.parquet"),
        ("txt:good.txt", "text:good.txt"),
    ],
)
def test_a_source_without_its_kind_is_answered_with_what_it_may_mean(given_source: str, meant: str) -> None:
    with pytest.raises(HetnodeError, match=meant):
        spec_of(given_source)
    with pytest.raises(HetnodeError) as caught:
        open_source(given_source, "text")
    assert meant in caught.value.remedy


# Parquet


def test_rows_of_parquet_are_the_records_of_lines(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", list(texts()))
    jsonl(tmp_path / "a.jsonl")
    expected = samples(f"jsonl:{tmp_path / 'a.jsonl'}")
    np.testing.assert_array_equal(samples(f"parquet:{tmp_path / 'a.parquet'}"), expected)
    np.testing.assert_array_equal(samples(f"parquet:{tmp_path}"), expected)


def test_a_parquet_file_without_the_column_or_that_is_none_is_refused(tmp_path: Path) -> None:
    file = parquet(tmp_path / "a.parquet", list(texts()))
    with pytest.raises(HetnodeError, match="no column 'body', its columns are text, n"):
        list(open_source(f"parquet:{file}", "body").documents())
    for content in (b"", b"PAR1 and no more", file.read_bytes()[:-50]):
        file.write_bytes(content)
        assert file.name in refused(f"parquet:{file}").cause


@pytest.mark.usefixtures("small_parts")
def test_a_large_parquet_file_is_read_by_row_groups(tmp_path: Path) -> None:
    column = [os.urandom(100).hex() for _ in range(400)]
    source = open_source(f"parquet:{parquet(tmp_path / 'a.parquet', list(column))}", "text")
    shards = source.shards()
    assert is_streamed(shards)
    assert 5 < len(shards) < 40
    assert [document.text for shard in shards for document in shard.documents()] == column


def test_a_row_group_is_not_in_memory_as_a_whole(tmp_path: Path) -> None:
    column = [os.urandom(2000).hex() for _ in range(10_000)]
    file = tmp_path / "a.parquet"
    table = pyarrow.table({"text": column})
    pyarrow.parquet.write_table(table, file, 10**9, compression="none", use_dictionary=False)
    del table
    before = pyarrow.total_allocated_bytes()
    for _ in open_source(f"parquet:{file}", "text").documents():
        assert pyarrow.total_allocated_bytes() - before < 2**24


# Large files


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("kind", ["text", "jsonl"])
def test_a_large_file_is_read_in_parts_that_tile_it(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "large"
    file.write_bytes(LINES.encode() if kind == "text" else lines([{"text": text} for text in texts(200)]))
    source = open_source(f"{kind}:{file}", "text")
    shards = source.shards()
    assert is_streamed(shards)
    assert [shard.nbytes for shard in shards[:-1]] == [8000] * (file.stat().st_size // 8000)
    found = [document.text for document in source.documents()]
    assert "".join(found) == (LINES if kind == "text" else "".join(texts(200)))
    np.testing.assert_array_equal(samples(f"{kind}:{file}"), samples(f"{kind}:{file}"))
    assert any(document.held_out for document in source.documents())


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("ending", PACK)
def test_large_packed_files_are_one_part_each(tmp_path: Path, ending: str) -> None:
    for name in "ab":
        content = lines([{"text": os.urandom(200).hex()} for _ in range(100)])
        (tmp_path / f"{name}.jsonl{ending}").write_bytes(PACK[ending](content))
    source = open_source(f"jsonl:{tmp_path}", "text")
    shards = source.shards()
    assert is_streamed(shards)
    assert [len(list(shard.documents())) for shard in shards] == [100, 100]


@pytest.mark.usefixtures("small_parts")
def test_of_a_large_file_a_first_step_reads_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts(4000)])
    read_from: list[FilePart] = []

    def counted(part: FilePart, most_line: int) -> Iterator[object]:
        read_from.append(part)
        return opened(part, most_line)  # type: ignore[return-value]

    monkeypatch.setattr("node.data.records.opened", counted)
    open_stream(spec_of(f"jsonl:{tmp_path}")).read(range(20))
    assert len(set(read_from)) <= 3
    assert len(list(parts_of([tmp_path / "a.jsonl"]))) > 100


@settings(max_examples=60, deadline=None)
@given(
    content=st.lists(st.sampled_from([b"\n", b"a", b"bc" * 9, "é漢🙂".encode(), b"x" * 200])),
    size=st.integers(5, 90),
)
def test_parts_tile_any_file_and_cut_no_character(
    content: list[bytes], size: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("parts") / "file"
    file.write_bytes(whole := b"".join(content))
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("node.data.files.PART", size)
        for part in parts_of([file]):
            with opened(part, most_line=64) as data:
                found.append(data.read())
    assert b"".join(found) == whole
    for piece in found:
        piece.decode()


def test_a_text_of_less_than_a_sample_says_how_much_it_has(tmp_path: Path) -> None:
    for length, split in ((10, "training"), (500, "validation")):
        (tmp_path / "small.txt").write_text("x" * length)
        with pytest.raises(HetnodeError) as caught:
            open_stream(spec_of(f"text:{tmp_path / 'small.txt'}"))
        assert caught.value.code is ErrorCode.DATA_TOO_SMALL
        assert split in caught.value.cause
        assert f"({length + 1} tokens in all)" in caught.value.cause


# Bad records


def with_bad(count: int, at: set[int], bad: object) -> list[object]:
    return [bad if number in at else {"text": text} for number, text in enumerate(texts(count))]


@pytest.mark.parametrize("bad", [{"text": None}, {"body": "x"}, {}, None, [], {"text": 5}])
def test_a_few_records_without_text_are_left_out(
    tmp_path: Path, bad: object, caplog: pytest.LogCaptureFixture
) -> None:
    file = jsonl(tmp_path / "a.jsonl", with_bad(100, {7, 50}, bad))
    with caplog.at_level(logging.WARNING):
        assert read(f"jsonl:{file}") == [text for n, text in enumerate(texts(100)) if n not in (7, 50)]
    assert "1 of 8 records left out" in caplog.text
    assert "line 8" in caplog.text
    held_out = [each.text for each in open_source(f"jsonl:{file}", "text").documents() if each.held_out]
    jsonl(file, with_bad(100, set(), None))
    all_held_out = [each.text for each in open_source(f"jsonl:{file}", "text").documents() if each.held_out]
    assert set(held_out) <= set(all_held_out), "a bad record moves no other into the other split"


@pytest.mark.parametrize("line", [b'{"text": "cut', b"\xff\xfe", b"[" * 100_000, b"\0" * 50])
def test_a_few_lines_that_are_no_json_are_left_out(tmp_path: Path, line: bytes) -> None:
    good = lines(with_bad(50, set(), None)).splitlines()
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([*good[:30], line, *good[30:]]))
    assert read(f"jsonl:{tmp_path}") == texts(50)


def test_a_null_row_is_left_out_of_parquet_and_of_a_data_set(tmp_path: Path) -> None:
    column = [None if number == 40 else text for number, text in enumerate(texts(100))]
    parquet(tmp_path / "a.parquet", column)
    expected = [text for text in column if text is not None]
    assert read(f"parquet:{tmp_path}") == expected
    assert read(f"hf:{tmp_path}") == expected
    samples(f"hf:{tmp_path}", 100)


@pytest.mark.parametrize(
    ("value", "what"), [("null", "null"), ("7", "a number"), ("[]", "a list"), ("{}", "an object")]
)
def test_what_stands_in_place_of_a_text_is_named(tmp_path: Path, value: str, what: str) -> None:
    (tmp_path / "a.jsonl").write_text(f'{{"text": {value}}}\n' * 30)
    assert f"under the key 'text' is {what}" in refused(f"jsonl:{tmp_path / 'a.jsonl'}").cause


def test_a_row_of_parquet_that_is_no_utf8_is_one_bad_record(tmp_path: Path) -> None:
    """Others of its batch stay, and nobody is told to convert the file as a text."""
    rows = [f"row {number} ".encode() * 20 for number in range(100)]
    for bad, count in ((1, 99), (100, 0)):
        data = pyarrow.array([*[b"caf\xe9"] * bad, *rows[bad:]], pyarrow.binary()).view(pyarrow.string())
        file = tmp_path / f"{bad}.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"text": data}), file)
        if count:
            assert len([each for each in open_source(f"parquet:{file}", "text").documents()]) == count
        else:
            error = refused(f"parquet:{file}")
            assert "row 0" in error.cause
            assert "is no UTF-8 text" in error.cause
            assert "iconv" not in error.remedy


def test_a_later_part_of_a_file_is_named_as_its_beginning_tells(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(LINES.encode("utf-16"))
    middle = FilePart(file, 101, 4096)
    assert not_utf8(middle, file.read_bytes()[101:4096]).cause.endswith("UTF-16.")


def test_more_bad_records_than_a_small_share_end_the_reading_with_the_first(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", with_bad(100, set(range(10, 16)), {"body": 1}))
    error = refused(f"jsonl:{file}")
    assert "line 11" in error.cause
    assert "6 of 100 records are bad" in error.cause
    jsonl(file, [{"body": number} for number in range(100_000)])
    assert "501 of 501 records" in refused(f"jsonl:{file}").cause


@pytest.mark.usefixtures("small_parts")
def test_a_damaged_place_in_a_large_text_costs_a_block(tmp_path: Path) -> None:
    damaged = LINES.encode().replace(b"line 2000 ", b"line \xff000 ")
    (tmp_path / "a.txt").write_bytes(damaged)
    found = "".join(read(f"text:{tmp_path}"))
    assert 0 < len(LINES) - len(found) <= 100
    assert "line 1990 " in found


def test_a_short_part_of_a_data_set_may_have_one_bad_record_but_not_many(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", with_bad(10, {5}, {"text": None}))
    jsonl(tmp_path / "b.jsonl", with_bad(90, set(), None))
    assert len(read(f"hf:{tmp_path}")) == 99
    jsonl(tmp_path / "b.jsonl", with_bad(90, set(range(20, 30)), {"text": None}))
    assert "10 of 90 records" in refused(f"hf:{tmp_path}").cause
