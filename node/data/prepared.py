"""Prepared sources: tokens in files that their hashes name, as ``hetnode data prepare`` writes them.

A manifest lists the parts of a source (the shards of node/data/sources.py), and of each part its token files:
the ids of whole documents in their order, little-endian, and then the index, a little-endian uint32 for each
document: its number of ids, and HELD_OUT if it is held out for validation. A specification names the hash of
the manifest, so it names every byte. Samples are those of the source itself with the same tokenizer.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from node.data.files import unreadable
from node.data.shard_files import file_at, is_url
from node.data.streamed import ShardReader
from node.data.tokenizer import Tokenizer
from protocol.errors import ErrorCode, HetnodeError

MANIFEST_FILE = "manifest.json"
MOST_MANIFEST = 2**26
"""Bytes of a manifest: that of 10 TB of tokens."""
HELD_OUT = 2**31
MOST_TOKENS = 2**29
"""Ids of a token file, which has whole documents: no document has half of them."""
INDEX_BYTES = 4
_MOST_OPEN = 256
_FORM = re.compile(r"(.+)#sha256=([0-9a-f]{64})", re.DOTALL)


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


IdsAt = Callable[[np.ndarray], np.ndarray]
"""The ids at some positions among those of the chosen documents of a token file."""


class TokenShard(_Record):
    """A token file: `tokens` ids of `documents`, of which `held_out` ids are held out."""

    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    documents: int = Field(ge=1, le=MOST_TOKENS)
    tokens: int = Field(ge=0, le=MOST_TOKENS)
    held_out: int = Field(ge=0, le=MOST_TOKENS)

    @property
    def name(self) -> str:
        return f"{self.sha256}.tokens"


class PreparedPart(_Record):
    """A part of the source, which had `nbytes`; see :class:`node.data.sources.SourceShard`."""

    nbytes: int | None = Field(ge=0, lt=2**63)
    shards: tuple[TokenShard, ...]


class PreparedManifest(_Record):
    """What was prepared; `tokenizer` is the hash of its file, "" for bytes."""

    version: Literal[1] = 1
    tokenizer: str = Field(max_length=64)
    separator: tuple[int, ...] = Field(max_length=64)
    vocabulary: int = Field(ge=1, le=2**31)
    parts: tuple[PreparedPart, ...]


def separator_of(tokenizer: Tokenizer) -> tuple[int, ...]:
    return tuple(tokenizer.separator.tolist())


def width_of(vocabulary: int) -> int:
    """Bytes of an id."""
    return 1 if vocabulary <= 2**8 else 2 if vocabulary <= 2**16 else 4


class PreparedSource:
    """A prepared source at `place`, the text after ``shards:``. Files are opened when they are read.

    Raises HetnodeError DATA_UNREADABLE.
    """

    def __init__(self, place: str) -> None:
        self.name = f"shards:{place}"
        if (found := _FORM.fullmatch(place)) is None:
            why = "it does not end in #sha256=HEX, the hash of its manifest"
            raise unreadable(self.name, why, "Write what 'hetnode data prepare' has printed.")
        where, self._sha256 = os.path.expanduser(found[1]), found[2]
        where += f"/{MANIFEST_FILE}" * Path(where).is_dir()
        if not is_url(where) and not Path(where).is_file():
            raise unreadable(where, "there is no such file", "Name what 'hetnode data prepare' wrote.")
        self._base, self._file = os.path.split(where)
        self._opened = lru_cache(_MOST_OPEN)(self._open)

    @cached_property
    def manifest(self) -> PreparedManifest:
        path = file_at(self._base, self._file, self._sha256, MOST_MANIFEST)
        try:
            with path.open("rb") as file:
                return PreparedManifest.model_validate_json(file.read(MOST_MANIFEST))
        except (OSError, ValueError) as error:
            why = f"it is no manifest of this version: {' '.join(str(error).split())[:200]}"
            raise unreadable(path, why, "Prepare the data again, or update the program.") from None

    def parts_for(self, tokenizer: Tokenizer) -> Sequence[PreparedPart]:
        """The parts. Raises HetnodeError TOKENIZER_MISMATCH unless `tokenizer` has made these tokens."""
        found, used = self.manifest, (tokenizer.sha256, tokenizer.vocabulary, separator_of(tokenizer))
        if used != (found.tokenizer, found.vocabulary, found.separator):
            made = (found.tokenizer, found.vocabulary, found.separator)
            cause = f"{self.name} has tokenizer, vocabulary and end of texts {made}; the run has {used}."
            remedy = "Set data.tokenizer and data.end_token as they were, or prepare the data again."
            raise HetnodeError(ErrorCode.TOKENIZER_MISMATCH, cause, remedy)
        return found.parts

    def tokens(self, shards: Sequence[TokenShard], held_out: bool | None) -> PreparedTokens:
        """The ids in some token files that are held out or not; None: all."""
        counts = [(each.tokens - each.held_out, each.held_out, each.tokens) for each in shards]
        column = 2 if held_out is None else int(held_out)
        ids_of = [each[column] for each in counts]
        return PreparedTokens(ids_of, lambda index: self._opened(shards[index], held_out))

    def _open(self, shard: TokenShard, held_out: bool | None) -> IdsAt:
        vocabulary = self.manifest.vocabulary
        stop = shard.tokens * width_of(vocabulary)
        nbytes = stop + shard.documents * INDEX_BYTES
        path = file_at(self._base, shard.name, shard.sha256, nbytes)
        wrong = unreadable(path, "it is not what its manifest says", "Prepare the data again.")
        if path.stat().st_size != nbytes:
            raise wrong
        content = np.memmap(path, np.uint8, mode="r")
        tokens = content[:stop].view(f"<u{width_of(vocabulary)}")
        index = content[stop:].copy().view("<u4").astype(np.int64)
        lengths, is_out = index % HELD_OUT, index >= HELD_OUT
        is_right = (lengths.sum(), lengths[is_out].sum()) == (shard.tokens, shard.held_out)
        if not is_right or tokens.max(initial=0) >= vocabulary:
            raise wrong
        chosen = slice(None) if held_out is None else is_out == held_out
        ends = np.cumsum(lengths[chosen])
        shifts = np.cumsum(lengths)[chosen] - ends
        return lambda at: tokens[at + shifts[np.searchsorted(ends, at, "right")]]


class PreparedTokens:
    """The ids of a split, in token files that follow each other. Only those that are read are opened."""

    def __init__(self, counts: Sequence[int], opened: Callable[[int], IdsAt]) -> None:
        self._opened, self._ends = opened, np.cumsum([0, *counts], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, at: np.ndarray) -> np.ndarray:
        """The ids at positions `at`, int64 of any shape; int32 of the same shape."""
        found, files = np.empty(at.shape, np.int32), np.searchsorted(self._ends, at, "right") - 1
        for number in np.unique(files):
            chosen = files == number
            found[chosen] = self._opened(number)(at[chosen] - self._ends[number])
        return found


class PreparedReader(ShardReader):
    """The same windows in the same order, of ids that can be read anywhere."""

    def __init__(self, ids: PreparedTokens, context: int, seed: int, name: str, most: int) -> None:
        super().__init__(lambda: iter(()), context, seed, name, most)
        self._ids, self.tokens_seen, self.size = ids, len(ids), max(len(ids) - 1, 0) // context

    def _seek(self, number: int) -> None:
        if number != self._number and self.size:
            windows = np.arange(number * self._most, min((number + 1) * self._most, self.size))
            at = windows[:, None] * self._context + np.arange(self._context + 1)
            self._number, self._slice = number, self._ids[at]
