"""Tokenizes a source once, into files that their hashes name (node/data/prepared.py).

A journal lists the files that are finished: an interrupted preparation goes on after them. Neither it nor the
manifest tells a path of this machine.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter, ValidationError

from node.data import prepared
from node.data.files import unreadable
from node.data.prepared import HELD_OUT, PreparedManifest, PreparedPart, TokenShard, separator_of, width_of
from node.data.sources import SourceShard, TextSource
from node.data.stream import encoded
from node.data.tokenizer import Tokenizer, Tokens
from protocol.errors import ErrorCode, HetnodeError
from protocol.trust.private_file import write_whole

SHARD_BYTES = 2**25
"""A token file ends with the document that reaches them: a node fetches whole files."""
_JOURNAL, _LINE = "journal.jsonl", TypeAdapter(tuple[int, TokenShard])
Told = Callable[[int, int, int, int], None]
"""Hears how many parts of the source are done, of how many, and how many files and tokens there are."""


def prepare(source: TextSource, text_field: str, tokenizer: Tokenizer, folder: Path, told: Told) -> str:
    """Write the token files of `source` and their manifest into `folder`; the hash (hex) of the manifest.

    Raises OSError; HetnodeError: as reading `source`; BAD_OPTION if `folder` has something else.
    """
    parts = source.shards()
    sizes = [each.nbytes for each in parts]
    about = json.dumps([source.name, text_field, sizes, tokenizer.sha256, separator_of(tokenizer)])
    folder.mkdir(parents=True, exist_ok=True)
    found = _finished(folder, hashlib.sha256(about.encode()).hexdigest())
    files = [[shard for part, shard in found if part == each] for each in range(len(parts))]
    begun = max((part for part, _ in found), default=0)
    count, tokens = len(found), sum(shard.tokens for _, shard in found)
    with (folder / _JOURNAL).open("ab") as journal:
        for index, part in list(enumerate(parts))[begun:]:
            told(index, len(parts), count, tokens)
            before = sum(shard.documents for shard in files[index])
            for shard, content in _shards_of(part, tokenizer, before):
                write_whole(folder / shard.name, content)
                journal.write(_LINE.dump_json((index, shard)) + b"\n")
                journal.flush()
                os.fsync(journal.fileno())
                files[index].append(shard)
                count, tokens = count + 1, tokens + shard.tokens
                told(index, len(parts), count, tokens)
    text = PreparedManifest(
        tokenizer=tokenizer.sha256,
        separator=separator_of(tokenizer),
        vocabulary=tokenizer.vocabulary,
        parts=tuple(PreparedPart(nbytes=a, shards=tuple(b)) for a, b in zip(sizes, files, strict=True)),
    ).model_dump_json()
    if len(text) > prepared.MOST_MANIFEST:
        raise unreadable(source.name, "one manifest cannot list so many files", "Prepare a part of it.")
    write_whole(folder / prepared.MANIFEST_FILE, text)
    told(len(parts), len(parts), count, tokens)
    return hashlib.sha256(text.encode()).hexdigest()


def _finished(folder: Path, about: str) -> list[tuple[int, TokenShard]]:
    """The part and the entry of each finished file; `about` is the hash of what is prepared."""
    path, found = folder / _JOURNAL, list[tuple[int, TokenShard]]()
    first, *lines = path.read_text().split("\n") if path.exists() else [about]
    if first != about:
        cause = f"{folder} has a preparation of other data, or with another tokenizer."
        raise HetnodeError(ErrorCode.BAD_OPTION, cause, f"Name another folder, or remove {path}.")
    for line in lines:
        try:
            part, shard = _LINE.validate_json(line)
        except ValidationError:  # the end, or where a crash has cut it
            break
        if not (folder / shard.name).is_file():
            break
        found.append((part, shard))
    written = (_LINE.dump_json(each).decode() for each in found)
    write_whole(path, "".join(f"{line}\n" for line in (about, *written)))
    return found


def _shards_of(part: SourceShard, tokenizer: Tokenizer, first: int) -> Iterator[tuple[TokenShard, bytes]]:
    """The token files of a part, from its document `first` on, and what is in them."""
    ids, index, width = list[Tokens](), list[int](), width_of(tokenizer.vocabulary)
    size = 0
    for held_out, document in encoded(islice(part.documents(), first, None), tokenizer):
        ids.append(document)
        index.append(len(document) + HELD_OUT * held_out)
        size += len(document) * width + prepared.INDEX_BYTES
        if size >= SHARD_BYTES:
            yield _shard(ids, index, width)
            ids, index, size = [], [], 0
    if index:
        yield _shard(ids, index, width)


def _shard(ids: Sequence[Tokens], index: Sequence[int], width: int) -> tuple[TokenShard, bytes]:
    content = np.concatenate(ids).astype(f"<u{width}").tobytes() + np.array(index, "<u4").tobytes()
    return TokenShard(
        sha256=hashlib.sha256(content).hexdigest(),
        documents=len(index),
        tokens=sum(map(len, ids)),
        held_out=sum(each - HELD_OUT for each in index if each >= HELD_OUT),
    ), content
