"""Samples of a source that is too large to be counted, found by ordinal without reading what comes before.

A source has shards, the files of a data set. How many windows a shard has is not known before it is read, so
ordinals are dealt in slices: SLICE consecutive ordinals belong to one shard. Every pass over the source gives
a shard as many turns as it has units of bytes, spread over the pass in an order keyed by the seed; each turn
takes the next slice of its shard. So all shards end at about the same time, whatever their sizes. The windows
of a slice are shuffled. To find a sample, one shard is read, from its beginning to the end of that slice.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import islice
from threading import Lock
from typing import Protocol

import numpy as np

from node.data.permutation import window_of
from node.data.tokenizer import Tokens
from protocol.errors import ErrorCode, HetnodeError

log = logging.getLogger(__name__)

Samples = np.ndarray[tuple[int, int], np.dtype[np.int32]]
Ordinals = range | Sequence[int]
Pass = Callable[[], Iterator[Tokens]]
"""Starts a pass over the tokens of documents, always in the same order."""


class Split(Protocol):
    """One endless sequence of windows: after the last one the next epoch begins."""

    def read(self, ordinals: Ordinals) -> Samples:
        """Windows int32 [n, L + 1], in the order asked for."""
        ...


SLICE = 1024
"""Windows of a shard that follow each other. With more, shards are opened less often, and mixed less."""

_UNIT = 2**26
"""Bytes of a shard for each turn."""
_MOST_UNITS = 2**16
"""Units of a source, but for one more of each shard: a larger source has larger ones."""

_MOST_OPEN = 8
"""Shards that stay open where they were left, so that the next slice need not begin at their beginning."""


class ShardReader:
    """The windows of one sequence of documents, over and over, slice by slice, each slice shuffled.

    The state is one pass over the documents: the number of the slice taken last, and its windows.
    """

    def __init__(self, documents: Pass, context: int, seed: int, name: str, most: int) -> None:
        self._documents, self._context, self._seed, self._name = documents, context, seed, name
        self._most = most
        self.size: int | None = None
        """Windows of the whole sequence; None until its end has been reached."""
        self.tokens_seen = 0
        self._is_used_again = False
        self._rewind()

    def _rewind(self) -> None:
        self.tokens_seen = 0
        self._windows = pack(self._counted(self._documents()), self._context)
        self._number, self._slice = -1, np.empty((0, self._context + 1), np.int32)

    def _counted(self, documents: Iterator[Tokens]) -> Iterator[Tokens]:
        for tokens in documents:
            self.tokens_seen += len(tokens)
            yield tokens

    def window(self, position: int) -> Tokens | None:
        """Window int32 [L + 1]; None if the sequence has not one. An earlier slice starts a new pass."""
        while self.size != 0:
            passes, at = (0, position) if self.size is None else divmod(position, self.size)
            if passes and not self._is_used_again:
                self._is_used_again = True
                log.warning("the %s ends after %d samples; they are used again", self._name, self.size)
            number, offset = divmod(at, self._most)
            self._seek(number)
            if number == self._number and offset < (count := len(self._slice)):
                window: Tokens = self._slice[window_of(passes * count + offset, count, self._seed)[1]]
                return window
        return None

    def _seek(self, number: int) -> None:
        """Read slice `number`, or all up to the end, which gives the size."""
        if number < self._number:
            self._rewind()
        while self._number < number and (self.size is None or (self._number + 1) * self._most < self.size):
            try:
                windows = list(islice(self._windows, self._most))
            except BaseException:
                # A generator that raised looks exhausted; the next read must not mistake that for the end.
                self._rewind()
                raise
            self._number += 1
            self._slice = np.stack(windows) if windows else self._slice[:0]
            if len(windows) < self._most:
                self.size = self._number * self._most + len(windows)


OpenReader = Callable[[int, int, str, int], ShardReader]
"""Opens a shard, with L, the seed, what to call the shard, and the windows of a slice."""


class StreamedSplit:
    """The windows of shards, dealt in slices of `most` windows.

    Shards without a window are passed over. A shard that ends earlier than others is used again earlier.

    Args:
        nbytes: the size of each shard; None where it is not known, which gives it one turn of each pass.

    Raises (when read) HetnodeError DATA_TOO_SMALL if no shard has a window.
    """

    def __init__(
        self,
        shards: Sequence[OpenReader],
        nbytes: Sequence[int | None],
        context: int,
        seed: int,
        name: str,
        most: int = SLICE,
    ) -> None:
        self._shards, self._context, self._seed, self._name = shards, context, seed, name
        self._most, self._lock = most, Lock()
        self._turns = turns_of(nbytes)
        self._pass, self._order = -1, list[tuple[int, int]]()
        self._open: OrderedDict[int, ShardReader] = OrderedDict()
        self._empty: dict[int, int] = {}
        """Tokens of the shards that have no window."""

    def read(self, ordinals: Ordinals) -> Samples:
        # In ascending order, because then one pass is enough. Several threads may share this.
        with self._lock:
            windows = {j: self._window(j) for j in sorted(set(ordinals))}
        if not windows:
            return np.empty((0, self._context + 1), dtype=np.int32)
        return np.stack([windows[j] for j in ordinals])

    def _window(self, ordinal: int) -> Tokens:
        if ordinal < 0:
            raise ValueError(f"the ordinal {ordinal} is negative")
        turn, offset = divmod(ordinal, self._most)
        count = len(self._shards)
        if count:
            passes, at = divmod(turn, sum(self._turns))
            if passes != self._pass:
                self._pass, self._order = passes, order_of(self._turns, self._seed, passes)
            first, rank = self._order[at]
        for index in ((first + step) % count for step in range(count)):
            if index not in self._empty:
                reader = self._reader(index)
                window = reader.window((passes * self._turns[first] + rank) * self._most + offset)
                if window is not None:
                    return window
                self._empty[index] = reader.tokens_seen
        raise too_small(self._name, max(self._empty.values(), default=0), self._context)

    def _reader(self, index: int) -> ShardReader:
        if index not in self._open:
            of = f", shard {index + 1} of {len(self._shards)}," if len(self._shards) > 1 else ""
            name = self._name + of
            self._open[index] = self._shards[index](self._context, self._seed, name, self._most)
            if len(self._open) > _MOST_OPEN:
                self._open.popitem(last=False)
        self._open.move_to_end(index)
        return self._open[index]


def turns_of(nbytes: Sequence[int | None]) -> list[int]:
    """The turns of each shard in a pass: one for every unit of its bytes that has begun, at least one."""
    unit = max(_UNIT, -(-sum(each or 0 for each in nbytes) // _MOST_UNITS))
    return [max(1, -(-(each or 0) // unit)) for each in nbytes]


def order_of(turns: Sequence[int], seed: int, number: int) -> list[tuple[int, int]]:
    """The turns of pass `number`: a shard, and how many turns of it were before in this pass.

    Turn r of a shard with u turns comes at (r + f) / u of the pass, 0 <= f < 1, where f is a hash.
    """
    key = b"%d/%d" % (seed, number)
    at = []
    for shard, count in enumerate(turns):
        digest = blake2b(b"%d" % shard, key=key, digest_size=8).digest()
        f = int.from_bytes(digest, "little")
        at += [(((rank << 64) + f) // count, shard, rank) for rank in range(count)]
    return [(shard, rank) for _, shard, rank in sorted(at)]


def pack(documents: Iterable[Tokens], context: int) -> Iterator[Tokens]:
    """Windows of context + 1 tokens. Each begins with the last token of the previous one."""
    rest: Tokens = np.empty(0, dtype=np.int32)
    for tokens in documents:
        rest = np.concatenate([rest, tokens])
        count = max(len(rest) - 1, 0) // context
        for start in range(0, count * context, context):
            yield rest[start : start + context + 1]
        rest = rest[count * context :]


def too_small(name: str, found: int, context: int) -> HetnodeError:
    """DATA_TOO_SMALL of a split, or of the largest of its shards, that has `found` tokens."""
    return HetnodeError(
        ErrorCode.DATA_TOO_SMALL,
        f"The {name} has {found} tokens; one sample needs {context + 1}.",
        "Use more text (the split needs several documents) or a smaller model.context.",
    )
