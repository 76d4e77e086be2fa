"""What one document is in a file: a block of text, a line of JSON, or a row of a Parquet file.

A record without a text stands as the reason for it (node/data/skipping.py). What shows that a file is none of
its kind ends its reading at once.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from node.data.files import (
    LARGE,
    MOST_RECORD,
    PART,
    FilePart,
    not_utf8,
    opened,
    reading,
    text_bytes,
    unreadable,
)
from node.extras import Extra, needed
from protocol.errors import HetnodeError

Record = str | HetnodeError

LARGEST_BLOCK = 65536
_READ_CHARACTERS = 2**20
_ROWS = 128
MOST_TEXT = 4 * LARGE
"""Characters of the files of a source that is not large."""
_JQ = "Give one record a line: jq -c {} FILE > NEW.jsonl."


def block_size(files: Sequence[Path]) -> int:
    """Most characters of a block: fewer for a short text, so that it has validation documents, too."""
    whole = 0
    for piece in chain.from_iterable(_pieces(FilePart(file), "strict") for file in files):
        whole += len(piece)
        if whole > MOST_TEXT:
            raise unreadable(files[0].parent, "its files expand without end", "Use another copy of the data.")
    return min(max(whole // 32, 1024), LARGEST_BLOCK)


def blocks_of(part: FilePart, size: int, is_strict: bool) -> Iterator[Record]:
    """The text of a part, cut into blocks of at most `size` characters, at the end of a line if possible.

    Unless `is_strict`, a block that is not UTF-8 is bad, and not the whole file.
    """
    for block in _cut(_pieces(part, "strict" if is_strict else "surrogateescape"), size):
        try:
            yield block if is_strict or block.encode() else ""
        except UnicodeEncodeError:
            yield not_utf8(part, block.encode(errors="surrogateescape"))


def _pieces(part: FilePart, errors: str) -> Iterator[str]:
    """The text of a part in pieces, so that a large one is in memory only once: as tokens."""
    encoding = "utf-8" if part.start else "utf-8-sig"
    with opened(part) as file, io.TextIOWrapper(file, encoding, errors) as text:
        piece = text.read(_READ_CHARACTERS)
        if 4 * piece.count("\0") > len(piece) > 0:  # valid UTF-8, but what stands there is something else
            raise not_utf8(part, piece.encode(errors="surrogateescape"))
        while piece:
            yield piece
            piece = text.read(_READ_CHARACTERS)


def _cut(pieces: Iterator[str], size: int) -> Iterator[str]:
    text, start = "", 0
    for piece in chain(pieces, [""]):
        text, start = text[start:] + piece, 0
        # A block ends before the last character that is known, unless the text does.
        while start + size < len(text) or (not piece and start < len(text)):
            stop = start + size
            if stop < len(text):
                stop = text.rfind("\n", start, stop) + 1 or stop
            yield text[start:stop]
            start = stop


def lines_of(part: FilePart, text_field: str) -> Iterator[Record]:
    """The texts of a part whose lines are JSON; a blank line is no record."""
    is_first = not part.start
    with opened(part, MOST_RECORD) as lines:
        for number, line in enumerate(iter(lambda: lines.readline(MOST_RECORD + 1), b""), 1):
            if not line.strip():
                continue
            if is_first:
                _require_lines(part, line.strip().removeprefix(b"\xef\xbb\xbf"))
            is_first, where = False, f"{part}, line {number}"
            if len(line) > MOST_RECORD:
                raise _too_long(where)
            yield _line(line, where, text_field)


def _require_lines(part: FilePart, first: bytes) -> None:
    """Raise DATA_UNREADABLE where the first line shows a file of another form."""
    if first.startswith(b"["):
        raise unreadable(part, "it is a JSON array, line 1 begins it", _JQ.format("'.[]'"))
    if first.startswith(b"{") and first.endswith((b"{", b"[", b",", b":")):
        why = "it is pretty-printed JSON: a record in it takes several lines, line 1 is no record"
        raise unreadable(part, why, _JQ.format("."))
    if b"\0" in first[:4096] and len(first) <= MOST_RECORD:
        raise not_utf8(part, first)


def _line(line: bytes, where: str, text_field: str) -> Record:
    try:
        record = json.loads(line)
    except UnicodeDecodeError as error:
        return not_utf8(where, error.object)
    except (ValueError, RecursionError) as error:
        return unreadable(where, f"it is not JSON ({error})", "Correct or remove that line.")
    return text_of(record, where, text_field)


def row_parts(files: Sequence[Path]) -> Iterator[FilePart]:
    """Row groups of Parquet files that follow each other, about PART bytes together. Reads the footers."""
    for file in files:
        with _parquet(file) as parquet:
            groups = [parquet.metadata.row_group(n).total_byte_size for n in range(parquet.num_row_groups)]
            first = nbytes = 0
            for number, size in enumerate(groups, 1):
                nbytes += size
                if nbytes >= PART or number == len(groups):
                    yield FilePart(file, first, number, nbytes * text_bytes([file]) // sum(groups))
                    first, nbytes = number, 0


def rows_of(part: FilePart, text_field: str) -> Iterator[Record]:
    """The texts in a column of a Parquet file. `start` and `stop` of its part count row groups."""
    with reading(part.file), _parquet(part.file) as parquet:
        columns = parquet.schema_arrow.names
        if text_field not in columns:
            raise unreadable(
                part.file,
                f"it has no column '{text_field}', its columns are {', '.join(columns)[:80]}",
                "Set data.text_field to the column of the text.",
            )
        groups = range(parquet.num_row_groups)
        row = sum(parquet.metadata.row_group(group).num_rows for group in groups[: part.start])
        for batch in parquet.iter_batches(
            _ROWS, groups[part.start : part.stop], [text_field], use_threads=False
        ):
            for text in map(_value, batch.column(0)):
                yield text_of({text_field: text}, f"{part.file}, row {row}", text_field)
                row += 1


def _value(scalar: Any) -> Any:
    """What stands in a row; its bytes where they are no UTF-8 text."""
    try:
        return scalar.as_py()
    except UnicodeDecodeError as error:
        return error.object


def _parquet(file: Path) -> Any:
    with needed(Extra.HF):
        import pyarrow.parquet  # type: ignore[import-untyped]  # noqa: PLC0415
    with reading(file):
        # With a buffer it reads page by page; without one, a row group is in memory as a whole.
        return pyarrow.parquet.ParquetFile(file, buffer_size=2**20, pre_buffer=False)


def text_of(record: object, where: str, text_field: str) -> Record:
    """The text of a record, or why it has none."""
    text = record.get(text_field) if isinstance(record, dict) else None
    if not isinstance(text, str):
        why = f"the record has no text under the key '{text_field}'"
        if isinstance(record, dict):
            kinds = {dict: "an object", list: "a list", bytes: "no UTF-8 text", type(None): "null"}
            why += f", its keys are {', '.join(map(str, record))[:80]}"
            if text_field in record:
                why = f"under the key '{text_field}' is {kinds.get(type(text), 'a number')}"
        return unreadable(where, why, "Set data.text_field to the key of the text, or correct that record.")
    return text if len(text) <= MOST_RECORD else _too_long(where)


def _too_long(where: str) -> HetnodeError:
    return unreadable(where, f"it has more than {MOST_RECORD >> 20} MiB", "Divide or remove that record.")
