"""Sources of text. Each document belongs to the training or the validation split.

The split depends only on a document's name or ordinal, not on a seed: all nodes hold out the same documents,
and runs can be compared.

===================  ====================================================  ===============================
source               one document is                                       held out for validation
===================  ====================================================  ===============================
builtin              one ``*.py`` file of the interpreter's library        1 in 20, by path
text:PATH            one block of a file, or of the ``*.txt`` of a folder  1 in 20, by ordinal
jsonl:PATH           one record of a file, or of the ``*.jsonl``           1 in 20, by ordinal
hf:NAME[/CONFIG]     one record of the ``train`` split                     1 in 100, by ordinal in its shard
===================  ====================================================  ===============================
"""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from itertools import chain
from pathlib import Path

import psutil

from node.data.hub import Shard, hub_shards, is_hub_name
from protocol.errors import ErrorCode, HetnodeError

_MOST_RECORD = 2**26
"""Bytes of one record, far more than any document has."""
_READ_CHARACTERS = 2**20
_NOT_CORPUS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


@dataclass(frozen=True)
class Document:
    """One piece of text, and whether it is held out for validation."""

    text: str
    held_out: bool


Pass = Callable[[], Iterator[Document]]


@dataclass(frozen=True)
class SourceShard:
    """One file of a source, or all of it.

    Attributes:
        documents: starts a new pass over its documents, which come always in the same order.
        nbytes: the size of its file, 0 for a source that always fits; None: it is not known.
    """

    documents: Pass
    nbytes: int | None = 0


@dataclass(frozen=True)
class TextSource:
    """A source of documents. `shards` lists its shards.

    Finding the shards and reading them raises DATA_UNREADABLE; MISSING_EXTRA if the library for this source
    is not installed.
    """

    name: str
    shards: Callable[[], Sequence[SourceShard]]

    def documents(self) -> Iterator[Document]:
        """A new pass over the documents of all shards, one shard after the other."""
        for shard in self.shards():
            yield from shard.documents()


def open_source(source: str, text_field: str, may_open_files: bool = True) -> TextSource:
    """Open a source by name; nothing is read yet.

    Args:
        source: ``builtin``, ``text:PATH``, ``jsonl:PATH`` or ``hf:NAME[/CONFIG]`` (node/data/hub.py).
        text_field: key of the text in jsonl and hf records.
        may_open_files: whether the owner of this machine has named `source`. Somebody else's source, such as
            that of a run, opens no path of this machine.

    Raises:
        HetnodeError: DATA_UNREADABLE if `source` has none of these forms; DATA_NOT_NAMED.
    """
    kind, _, rest = source.partition(":")
    if not may_open_files and names_files(source):
        raise not_named(f"its data from {source}", "--data", source)
    match kind:
        case "builtin" if not rest:
            return TextSource(source, lambda: [SourceShard(_library)])
        case "text" if rest:
            return TextSource(source, lambda: [SourceShard(partial(_text, _path(rest)))])
        case "jsonl" if rest:
            return TextSource(source, lambda: [SourceShard(partial(_jsonl, _path(rest), text_field))])
        case "hf" if rest:
            return TextSource(source, lambda: _hub(rest, text_field, may_open_files))
    raise unreadable(source, "its kind is unknown", "Use builtin, text:PATH, jsonl:PATH or hf:NAME[/CONFIG].")


def names_files(source: str) -> bool:
    """Whether `source` is a path of this machine: all that is neither built in nor on the hub."""
    kind, _, rest = source.partition(":")
    return source != "builtin" and not (kind == "hf" and is_hub_name(rest))


def not_named(what: str, option: str, path: str) -> HetnodeError:
    """The refusal to open a path that somebody else has named."""
    return HetnodeError(
        ErrorCode.DATA_NOT_NAMED,
        f"The run takes {what}, a path of this machine that its owner has not named. Nothing was read.",
        f"If you want to give what is there to the run, and to the peers in it, start the node with "
        f"{option} {path}, or with the path of your own copy. Otherwise take part in another run.",
    )


def _path(name: str) -> Path:
    # Path.expanduser would raise for an unknown user; here the path is reported as missing.
    return Path(os.path.expanduser(name))


def unreadable(what: object, why: object, remedy: str) -> HetnodeError:
    return HetnodeError(ErrorCode.DATA_UNREADABLE, f"The data {what} cannot be read: {why}.", remedy)


def _held_out(ordinal: int, one_in: int, shard: str = "") -> bool:
    """Whether this document of a shard is held out: one of every `one_in` consecutive documents is.

    A hash selects it, so the choice does not follow a period in the data. Of the first `one_in` it is the
    second document, so that a source of two documents has both splits.
    """
    group, position = divmod(ordinal, one_in)
    return position == (_hash(f"{shard}{group}") % one_in if group or shard else 1)


def _hash(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(errors="surrogateescape"), digest_size=8).digest(), "little")


def _library() -> Iterator[Document]:
    """Python files of the standard library, without tests, installed packages and unreadable files."""
    root = Path(sysconfig.get_path("stdlib"))
    found: dict[str, Path] = {}
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _NOT_CORPUS]
        for name in names:
            if name.endswith(".py"):
                path = Path(folder, name)
                found[path.relative_to(root).as_posix()] = path
    for relative in sorted(found):
        try:
            text = found[relative].read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):  # some files are test data with a wrong encoding
            continue
        yield Document(text, _hash(relative) % 20 == 0)


def _files(path: Path, suffix: str) -> list[Path]:
    """The file itself, or all files in and below a folder that end in `suffix`, in a fixed order.

    A device or a pipe has no end, so it is no file. Nothing is read of files that this machine cannot hold.
    """
    if path.exists() and not (path.is_dir() or path.is_file()):
        raise unreadable(path, "it is neither a file nor a folder", "Name a file or a folder of files.")
    files = sorted(each for each in path.rglob(f"*{suffix}") if each.is_file()) if path.is_dir() else [path]
    if not files:
        raise unreadable(path, f"the folder has no {suffix} file", "Name a file or a folder that holds some.")
    # A token takes up to 4 bytes, once more while all are put together; text has fewer tokens than bytes.
    whole = sum(file.stat().st_size for file in files if file.exists())
    free = psutil.virtual_memory().available
    if 2 * whole > free:
        raise unreadable(
            path,
            f"it has {whole / 1e9:.3g} GB, and all of it has to fit twice into the {free / 1e9:.3g} GB of "
            "memory that are free",
            "Name a part of it, or a folder of parquet or jsonl files as hf:FOLDER, which is read in pieces.",
        )
    return files


def _text(path: Path) -> Iterator[Document]:
    files = _files(path, ".txt")
    # Smaller blocks for a short text, so that it has validation documents, too.
    size = min(max(sum(len(piece) for file in files for piece in _pieces(file)) // 32, 1024), 65536)
    blocks = (block for file in files for block in _blocks(_pieces(file), size))
    for ordinal, block in enumerate(blocks):
        yield Document(block, _held_out(ordinal, 20))


def _pieces(file: Path) -> Iterator[str]:
    """The text of a file in pieces, so that a large one is in memory only once: as tokens."""
    try:
        with file.open(encoding="utf-8-sig") as text:
            while piece := text.read(_READ_CHARACTERS):
                yield piece
    except (OSError, ValueError) as error:
        raise unreadable(file, error, "Name a readable UTF-8 text file or a folder of *.txt.") from None


def _blocks(pieces: Iterator[str], size: int) -> Iterator[str]:
    """Cut a text into blocks of at most `size` characters, at the end of a line if possible."""
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


def _jsonl(path: Path, text_field: str) -> Iterator[Document]:
    ordinal = 0
    for file in _files(path, ".jsonl"):
        try:
            with file.open("rb") as lines:
                for line_number, line in enumerate(iter(lambda: lines.readline(_MOST_RECORD + 1), b""), 1):
                    if line.strip():
                        text = _record(line, f"{file}, line {line_number}", text_field)
                        yield Document(text, _held_out(ordinal, 20))
                        ordinal += 1
        except (OSError, ValueError) as error:
            raise unreadable(file, error, "Name a readable file or a folder of *.jsonl.") from None


def _record(line: bytes, where: str, text_field: str) -> str:
    if len(line) > _MOST_RECORD:
        raise _too_long(where)
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise unreadable(where, f"it is not JSON ({error})", "Correct or remove that line.") from None
    return _text_of(record, where, text_field)


def _text_of(record: object, where: str, text_field: str) -> str:
    text = record.get(text_field) if isinstance(record, dict) else None
    if not isinstance(text, str):
        keys = f", its keys are {', '.join(map(str, record))[:80]}" if isinstance(record, dict) else ""
        raise unreadable(
            where,
            f"the record has no text under the key '{text_field}'{keys}",
            "Set data.text_field to the key of the text, or correct that record.",
        )
    if len(text) > _MOST_RECORD:
        raise _too_long(where)
    return text


def _too_long(where: str) -> HetnodeError:
    return unreadable(where, f"it has more than {_MOST_RECORD >> 20} MiB", "Divide or remove that record.")


def _hub(location: str, text_field: str, may_open_files: bool) -> Sequence[SourceShard]:
    return [
        SourceShard(partial(_documents_of, index, shard, text_field), shard.nbytes)
        for index, shard in enumerate(hub_shards(location, may_open_files))
    ]


def _documents_of(index: int, shard: Shard, text_field: str) -> Iterator[Document]:
    for ordinal, record in enumerate(shard.records()):
        text = _text_of(record, f"hf:{shard.name}, record {ordinal}", text_field)
        yield Document(text, _held_out(ordinal, 100, f"{index}/" if index else ""))
