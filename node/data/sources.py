"""Where text comes from: the documents of a source, each known to be for training or for validation.

The split is a pure function of a document's name or ordinal, never of a seed, so all nodes hold out the
same documents and a run can be compared with another.

===================  ====================================================  ======================
source               one document is                                       held out for validation
===================  ====================================================  ======================
builtin              one ``*.py`` file of the interpreter's library        1 in 20, by path
text:PATH            one block of a file, or of the ``*.txt`` of a folder  1 in 20, by ordinal
jsonl:PATH           one record of a file, or of the ``*.jsonl``           1 in 20, by ordinal
hf:NAME[/CONFIG]     one record of the ``train`` split, streamed           1 in 100, by ordinal
===================  ====================================================  ======================
"""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from protocol.errors import ErrorCode, HetnodeError

_NOT_CORPUS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


@dataclass(frozen=True)
class Document:
    """One piece of text, and whether it is held out for validation."""

    text: str
    held_out: bool


@dataclass(frozen=True)
class Source:
    """A source of documents. `documents` starts a new pass over them, always in the same order.

    A `streamed` source may be larger than memory and is read forward; the others are loaded whole. Reading
    raises DATA_UNREADABLE.
    """

    name: str
    streamed: bool
    documents: Callable[[], Iterator[Document]]


def open_source(source: str, text_field: str) -> Source:
    """The source that a spec or a node names; nothing is read yet.

    Args:
        source: ``builtin``, ``text:PATH``, ``jsonl:PATH`` or ``hf:NAME[/CONFIG]``.
        text_field: key of the text in jsonl and hf records.

    Raises:
        HetnodeError: DATA_UNREADABLE where the source has none of these forms.
    """
    kind, _, rest = source.partition(":")
    match kind:
        case "builtin" if not rest:
            return Source(source, False, _library)
        case "text" if rest:
            return Source(source, False, lambda: _text(_path(rest)))
        case "jsonl" if rest:
            return Source(source, False, lambda: _jsonl(_path(rest), text_field))
        case "hf" if rest:
            return Source(source, True, lambda: _hub(rest, text_field))
    raise unreadable(source, "it is no known kind", "Use builtin, text:PATH, jsonl:PATH or hf:NAME[/CONFIG].")


def _path(name: str) -> Path:
    # Unlike Path.expanduser this leaves the name of an unknown user alone, to be reported as missing.
    return Path(os.path.expanduser(name))


def unreadable(what: object, why: object, remedy: str) -> HetnodeError:
    return HetnodeError(ErrorCode.DATA_UNREADABLE, f"The data {what} cannot be read: {why}.", remedy)


def _held_out(ordinal: int, one_in: int) -> bool:
    """Whether the document is the one that is held out of its run of `one_in` consecutive documents.

    A hash picks the place within each run, so no rhythm of the data is hit. In the first run it is always
    the second document: that way even a source of two documents has both splits.
    """
    run, place = divmod(ordinal, one_in)
    return place == (_hash(str(run)) % one_in if run else 1)


def _hash(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(errors="surrogateescape"), digest_size=8).digest(), "little")


def _library() -> Iterator[Document]:
    """Python files of the standard library, without tests and installed packages.

    A few are meant to be undecodable, and some systems ship some unreadable: those are skipped.
    """
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
        except (OSError, UnicodeDecodeError):
            continue
        yield Document(text, _hash(relative) % 20 == 0)


def _files(path: Path, suffix: str) -> list[Path]:
    """The file itself, or all files of a folder and below that end in `suffix`, in a fixed order."""
    if not path.is_dir():
        return [path]
    files = sorted(path.rglob(f"*{suffix}"))
    if not files:
        raise unreadable(path, f"the folder has no {suffix} file", "Name a file or a folder that holds some.")
    return files


def _text(path: Path) -> Iterator[Document]:
    texts = []
    for file in _files(path, ".txt"):
        try:
            texts.append(file.read_text(encoding="utf-8-sig"))
        except (OSError, ValueError) as error:
            raise unreadable(file, error, "Name a readable UTF-8 text file or a folder of *.txt.") from None
    # A short text is cut finer, so that it too has blocks to hold out.
    size = min(max(sum(map(len, texts)) // 32, 1024), 65536)
    blocks = (block for text in texts for block in _blocks(text, size))
    for ordinal, block in enumerate(blocks):
        yield Document(block, _held_out(ordinal, 20))


def _blocks(text: str, size: int) -> Iterator[str]:
    """Cut `text` into blocks of at most `size` characters, at the end of a line where there is one."""
    start = 0
    while start < len(text):
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
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        text = _record(line, f"{file}, line {number}", text_field)
                        yield Document(text, _held_out(ordinal, 20))
                        ordinal += 1
        except (OSError, ValueError) as error:
            raise unreadable(file, error, "Name a readable file or a folder of *.jsonl.") from None


def _record(line: bytes, where: str, text_field: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise unreadable(where, f"it is not JSON ({error})", "Correct or remove that line.") from None
    return _text_of(record, where, text_field)


def _text_of(record: object, where: str, text_field: str) -> str:
    text = record.get(text_field) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise unreadable(
            where,
            f"the record has no text under the key '{text_field}'",
            "Set data.text_field to the key of the text, or correct that record.",
        )
    return text


def _hub(location: str, text_field: str) -> Iterator[Document]:
    for ordinal, record in enumerate(_hub_records(location)):
        text = _text_of(record, f"hf:{location}, record {ordinal}", text_field)
        yield Document(text, _held_out(ordinal, 100))


def _hub_records(location: str) -> Iterator[object]:
    """Records of the ``train`` split, streamed: only what is read is fetched."""
    name, config = _hub_name(location)
    # Importing datasets takes a second, and only this source needs it.
    from datasets import load_dataset  # type: ignore[import-untyped]  # noqa: PLC0415

    try:
        yield from load_dataset(name, config, split="train", streaming=True)
    except Exception as error:  # whatever the library, its parsers and its transport raise
        raise unreadable(
            f"hf:{location}",
            f"{type(error).__name__}: {error}".rstrip("."),
            "Check the name and its configuration, that it has a 'train' split, and the connection to the "
            "Hugging Face Hub; or name a local folder, or use text:PATH or jsonl:PATH.",
        ) from None


def _hub_name(location: str) -> tuple[str, str | None]:
    """Split ``NAME[/CONFIG]``: an existing local path is a name as a whole; else ``name``, ``owner/name`` or
    ``owner/name/config``, since a name on the hub has at most two parts."""
    path = _path(location)
    if path.exists():
        return str(path), None
    parts = location.split("/")
    if len(parts) > 3 or not all(parts) or parts[0] in (".", "..", "~"):
        raise unreadable(
            f"hf:{location}",
            "there is no such local folder, and it is no name on the hub either",
            "Use hf:FOLDER, hf:NAME, hf:OWNER/NAME or hf:OWNER/NAME/CONFIG.",
        )
    return "/".join(parts[:2]), parts[2] if len(parts) == 3 else None
