"""Sources of text. Each document belongs to the training or the validation split.

The split depends only on a document's name or ordinal, not on a seed: all nodes hold out the same documents,
and runs can be compared.

===================  =====================================================  =============================
source               one document is                                        held out for validation
===================  =====================================================  =============================
builtin              one ``*.py`` file of the interpreter's library         1 in 20, by path
text:PATH            one block of a file, or of the ``*.txt`` of a folder   1 in 20, by ordinal
jsonl:PATH           one record of a file, or of the ``*.jsonl``            1 in 20, by ordinal
parquet:PATH         one row of a file, or of the ``*.parquet``             1 in 20, by ordinal
hf:NAME[/CONFIG]     one record of the ``train`` split                      1 in 100, by ordinal in its shard
shards:FOLDER        tokens of one of these (node/data/prepared.py)         as there
===================  =====================================================  =============================

Files may be packed (``.gz``, ``.zst``). Of more than LARGE bytes (node/data/files.py) 1 in 100 is held out,
by ordinal in its part.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from itertools import chain
from pathlib import Path

from node.data.files import LARGE, FilePart, files_of, parts_of, text_bytes, unreadable
from node.data.hub import Shard, hub_shards, is_hub_name
from node.data.prepared import PreparedSource
from node.data.records import (
    LARGEST_BLOCK,
    Record,
    block_size,
    blocks_of,
    lines_of,
    row_parts,
    rows_of,
    text_of,
)
from node.data.skipping import without_bad
from protocol.errors import ErrorCode, HetnodeError
from protocol.run_files.sources import likely_source

_KNOWN = "builtin, text:PATH, jsonl:PATH, parquet:PATH, hf:NAME[/CONFIG] or shards:FOLDER#sha256=HEX"
_NOT_CORPUS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


@dataclass(frozen=True)
class Document:
    """One piece of text, and whether it is held out for validation."""

    text: str
    held_out: bool


Pass = Callable[[], Iterator[Document]]


@dataclass(frozen=True)
class SourceShard:
    """One file of a source, a part of one, or all of the source.

    Attributes:
        documents: starts a new pass over its documents, which come always in the same order.
        nbytes: the size of its file, 0 for a source that always fits; None: it is not known.
    """

    documents: Pass
    nbytes: int | None = 0


@dataclass(frozen=True)
class TextSource:
    """A source of documents. `shards` lists its shards. One that is `prepared` has tokens instead.

    Finding the shards and reading them raises DATA_UNREADABLE; MISSING_EXTRA if the library for this source
    is not installed.
    """

    name: str
    shards: Callable[[], Sequence[SourceShard]]
    prepared: PreparedSource | None = None

    def documents(self) -> Iterator[Document]:
        """A new pass over the documents of all shards, one shard after the other."""
        for shard in self.shards():
            yield from shard.documents()


def open_source(source: str, text_field: str, may_open_files: bool = True) -> TextSource:
    """Open a source by name; no file is opened yet.

    Args:
        source: ``builtin``, ``text:PATH``, ``jsonl:PATH``, ``parquet:PATH`` or ``hf:NAME[/CONFIG]``
            (node/data/hub.py).
        text_field: key of the text in records.
        may_open_files: whether the owner of this machine has named `source`. Somebody else's source, such as
            that of a run, opens no path of this machine.

    Raises:
        HetnodeError: DATA_UNREADABLE if `source` has none of these forms, or names no file; DATA_NOT_NAMED.
    """
    kind, _, rest = source.partition(":")
    if not may_open_files and names_files(source):
        raise not_named(f"its data from {source}", "--data", source)
    match kind:
        case "builtin" if not rest:
            return TextSource(source, lambda: [SourceShard(_library)])
        case "text" | "jsonl" | "parquet" if rest:
            return _of_files(source, text_field)
        case "hf" if rest:
            return TextSource(source, lambda: _hub(rest, text_field, may_open_files))
        case "shards" if rest:
            return TextSource(source, lambda: _without_text(source), PreparedSource(rest))
    raise unreadable(source, "its kind is unknown", f"Use {likely_source(source) or _KNOWN}.")


def names_files(source: str) -> bool:
    """Whether `source` is a path of this machine: all that is neither built in nor on the hub."""
    kind, _, rest = source.partition(":")
    return source != "builtin" and not (kind == "hf" and is_hub_name(rest))


def not_named(what: str, option: str, *named: str) -> HetnodeError:
    """The refusal to open paths that somebody else has named; `named` is what `option` says of each."""
    options = " ".join(f"{option} {each}" for each in named)
    return HetnodeError(
        ErrorCode.DATA_NOT_NAMED,
        f"The run takes {what}, and the owner of this machine has not named that. Nothing was read.",
        f"If you want to give what is there to the run, and to the peers in it, start the node with "
        f"{options}, or with paths of your own copies. Otherwise take part in another run.",
    )


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


def _of_files(source: str, text_field: str) -> TextSource:
    """A source of files; large ones have their parts as shards. None is opened yet."""
    kind, _, name = source.partition(":")
    # Path.expanduser would raise for an unknown user; here the path is reported as missing.
    path = Path(os.path.expanduser(name))
    files = files_of(path, ".txt" if kind == "text" else f".{kind}")
    is_large = text_bytes(files) > LARGE

    def shards() -> Sequence[SourceShard]:
        read: Callable[[FilePart], Iterator[Record]]
        if kind == "text":
            size = LARGEST_BLOCK if is_large else block_size(files)
            read = partial(blocks_of, size=size, is_strict=not is_large)
        else:
            read = partial(rows_of if kind == "parquet" else lines_of, text_field=text_field)
        if not is_large:
            return [
                SourceShard(
                    partial(
                        _documents,
                        0,
                        lambda: chain.from_iterable(map(read, map(FilePart, files))),
                        is_part=False,
                    )
                )
            ]
        parts = (row_parts if kind == "parquet" else parts_of)(files)
        return [
            SourceShard(partial(_documents, index, partial(read, part)), part.nbytes)
            for index, part in enumerate(parts)
        ]

    return TextSource(source, shards)


def _hub(location: str, text_field: str, may_open_files: bool) -> Sequence[SourceShard]:
    return [
        SourceShard(partial(_documents, index, partial(_texts_of, shard, text_field)), shard.nbytes)
        for index, shard in enumerate(hub_shards(location, may_open_files))
    ]


def _without_text(source: str) -> Sequence[SourceShard]:
    raise unreadable(source, "it has tokens and no text", "Name the source from which it was prepared.")


def _texts_of(shard: Shard, text_field: str) -> Iterator[Record]:
    for ordinal, record in enumerate(shard.records()):
        yield text_of(record, f"hf:{shard.name}, record {ordinal}", text_field)


def _documents(
    index: int, records: Callable[[], Iterator[Record]], is_part: bool = True
) -> Iterator[Document]:
    """The documents of shard `index`, or of a source that is none of several, without bad records."""
    for ordinal, text in without_bad(records(), is_part):
        yield Document(text, _held_out(ordinal, 100 if is_part else 20, f"{index}/" if index else ""))
