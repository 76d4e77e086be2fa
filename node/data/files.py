"""Files of text or records: those that a path names, their parts, and what is wrong with one."""

from __future__ import annotations

import codecs
import io
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from node.extras import Extra, needed
from protocol.errors import ErrorCode, HetnodeError
from protocol.run_files.sources import kind_of_file

log = logging.getLogger(__name__)

LARGE = 2**30
"""Bytes of text beyond which a source is not tokenized before the first step, which would take minutes: its
files are read in parts, when these are needed (node/data/stream.py)."""
PART = 2**26
"""Bytes of one part of a large file."""
MOST_RECORD = 2**26
"""Bytes of one record, far more than any document has."""
_EXPANDS = 4
"""Text is taken to have this many times the bytes of its packed file."""
_PACKED = (".gz", ".zst")
_GZIP, _ZSTD, _PARQUET = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PAR1"
_MOST_NAMES = 5


def unreadable(what: object, why: object, remedy: str) -> HetnodeError:
    return HetnodeError(ErrorCode.DATA_UNREADABLE, f"The data {what} cannot be read: {why}.", remedy)


def files_of(path: Path, ending: str) -> list[Path]:
    """The file itself, or all files in and below a folder that end in `ending`, in a fixed order.

    They may be packed, which does not change the order, and have capitals in their ending. What a folder has
    beside them is named. A device or a pipe has no end, so it is no file.
    """
    try:
        if not path.exists():
            raise unreadable(path, "there is no such file or folder", "Name a file or a folder of files.")
        if path.is_file():
            return [path]
        if not path.is_dir():
            raise unreadable(path, "it is neither a file nor a folder", "Name a file or a folder of files.")
        inside = sorted(each for each in path.rglob("*") if each.is_file())
    except OSError as error:
        raise unreadable(path, error.strerror, "Name what this user may read.") from None
    found: dict[Path, Path] = {}
    others = []
    for each in inside:  # a file comes before its packed copy
        unpacked = each.with_suffix("") if each.suffix.lower() in _PACKED else each
        if unpacked.name.lower().endswith(ending) and unpacked not in found:
            found[unpacked] = each
        else:
            others.append(each)
    names = ", ".join(str(each.relative_to(path)) for each in others[:_MOST_NAMES])
    names += f" and {len(others) - _MOST_NAMES} more" if len(others) > _MOST_NAMES else ""
    if not found:
        kind = next((kind for each in others if (kind := kind_of_file(each.name))), "")
        instead = f", or use {kind}:{path}" if kind else ""
        why = f"the folder has no {ending} file{' but ' * bool(names)}{names}"
        raise unreadable(path, why, f"Name a file or a folder that holds some{instead}.")
    if others:
        log.warning("%s: %d other files are left out: %s", path, len(others), names)
    return [found[unpacked] for unpacked in sorted(found)]


def text_bytes(files: Sequence[Path]) -> int:
    """Bytes of the text in `files`, as far as their sizes and names tell."""
    dense = (*_PACKED, ".parquet")
    with reading(files[0]):
        return sum(each.stat().st_size * (_EXPANDS if each.suffix.lower() in dense else 1) for each in files)


@dataclass(frozen=True)
class FilePart:
    """A file, or the lines of a large plain one that begin in these bytes. `nbytes` of text."""

    file: Path
    start: int = 0
    stop: int | None = None
    nbytes: int = 0

    def __str__(self) -> str:
        return f"{self.file}" + f" after byte {self.start}" * bool(self.start)


def parts_of(files: Sequence[Path]) -> Iterator[FilePart]:
    """The parts of large files, in their order: a function of the files alone."""
    for file in files:
        with reading(file), file.open("rb") as raw:
            is_packed, size = raw.read(4).startswith((_GZIP, _ZSTD)), text_bytes([file])
        if is_packed or size <= PART:
            yield FilePart(file, nbytes=size)
        else:
            for at in range(0, size, PART):
                yield FilePart(file, at, at + PART, min(PART, size - at))


@contextmanager
def reading(file: object, remedy: str = "Check that the file is whole and readable.") -> Iterator[None]:
    """Around what reads `file`: each failure of it is DATA_UNREADABLE."""
    try:
        yield
    except HetnodeError:
        raise
    except UnicodeDecodeError as error:
        raise not_utf8(file, error.object) from None
    except Exception as error:  # the libraries that unpack raise many types
        why = getattr(error, "strerror", None) or f"{error}" or type(error).__name__
        raise unreadable(file, " ".join(why.split()).rstrip("."), remedy) from None


@contextmanager
def opened(part: FilePart, most_line: int = 2**16) -> Iterator[BinaryIO]:
    """The unpacked bytes of `part`, read in small pieces. A longer line than `most_line` may be cut.

    The first bytes tell how a file is packed, whatever its name says.
    """
    with reading(part), ExitStack() as stack:
        raw = stack.enter_context(part.file.open("rb"))
        first = raw.read(4)
        raw.seek(0)
        if part.stop is not None:
            start, stop = (_line_from(raw, at, most_line) for at in (part.start, part.stop))
            raw.seek(start)
            yield cast(BinaryIO, stack.enter_context(io.BufferedReader(_Limited(raw, stop - start))))
        elif first.startswith(_GZIP):
            import gzip  # noqa: PLC0415

            yield cast(BinaryIO, stack.enter_context(gzip.GzipFile(fileobj=raw)))
        elif first == _ZSTD:
            with needed(Extra.HF):
                import pyarrow  # type: ignore[import-untyped]  # noqa: PLC0415
            # Unlike the package zstandard, it notices that a file is cut.
            unpacked = pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, mode="r"), "zstd")
            yield cast(BinaryIO, stack.enter_context(io.BufferedReader(unpacked)))
        elif first == _PARQUET:
            raise unreadable(part, "it is a Parquet file", f"Use parquet:{part.file}.")
        else:
            yield raw


def _line_from(raw: BinaryIO, at: int, most_line: int) -> int:
    """Where the first line begins at or after byte `at`; where none does soon, a character after it."""
    if not at:
        return 0
    raw.seek(at - 1)
    line = raw.readline(most_line)
    if line.endswith(b"\n"):
        return raw.tell()
    end, more = raw.tell(), raw.read(4)
    return end + next((n for n, byte in enumerate(more) if byte & 0xC0 != 0x80), len(more))


class _Limited(io.RawIOBase):
    """The next `left` bytes of a file."""

    def __init__(self, raw: BinaryIO, left: int) -> None:
        self._raw, self._left = raw, left

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self._raw.read(min(len(buffer), self._left))
        buffer[: len(data)] = data
        self._left -= len(data)
        return len(data)


def not_utf8(file: object, data: bytes) -> HetnodeError:
    """The refusal of a file, of which `data` is a piece that is no UTF-8 text."""
    if isinstance(file, FilePart) and file.start:
        with file.file.open("rb") as raw:  # only the beginning tells the order of the bytes in a character
            head = raw.read(2**16)
        data = head if b"\0" in head else data
    seems = _encoding_of(data)
    if seems is None:
        return unreadable(file, "it is no text, but binary", "Name a UTF-8 text file.")
    if seems == "UTF-8":
        why = "some bytes in it are damaged: the rest seems to be UTF-8"
        return unreadable(
            file, why, "Get the file again, or drop them: iconv -c -f UTF-8 -t UTF-8 FILE > NEW."
        )
    why = f"it is not UTF-8, but seems to be {seems}"
    return unreadable(file, why, f"Convert it: iconv -f {seems.split()[0]} -t UTF-8 FILE > NEW.")


def _encoding_of(data: bytes) -> str | None:
    wide = data.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE))
    if wide or data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "UTF-32" if wide else "UTF-16"
    even, odd = data[::2].count(0), data[1::2].count(0)
    if even + odd:
        if max(even, odd) * 4 < len(data) or min(even, odd) * 4 > max(even, odd):
            return None
        return "UTF-16LE" if odd > even else "UTF-16BE"
    kept = data.decode(errors="ignore")
    lost, high = len(data) - len(kept.encode()), sum(byte >= 0x80 for byte in data)
    if 2 * lost < high:
        return "UTF-8"
    if any(0x80 <= byte < 0xA0 for byte in data):
        return "WINDOWS-1252 or another encoding of one or two bytes a character"
    return "ISO-8859-1 (Latin-1)"
