"""Samples of a source that may exceed the memory, found by ordinal without reading what comes before.

A source has shards, the files of a data set. How many windows a shard has is not known before it is read, so
ordinals are dealt to shards in slices: SLICE consecutive ordinals belong to one shard, every pass over the
shards goes through all of them in an order keyed by the seed, and pass number c takes slice c of every shard.
A sample depends on its ordinal and its shard alone. To find it, one shard is read, from its beginning to that
slice.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from node.data.permutation import window_of
from node.data.tokenizer import Tokens
from protocol.errors import ErrorCode, HetnodeError

log = logging.getLogger(__name__)

Samples = np.ndarray[tuple[int, int], np.dtype[np.int32]]
Ordinals = range | Sequence[int]
Pass = Callable[[], Iterator[Tokens]]
"""Starts a pass over the tokens of documents, always in the same order."""

SLICE = 1024
"""Windows of a shard that follow each other. With more, shards are opened less often, and mixed less."""

_MOST_OPEN = 8
"""Shards that stay open where they were left, so that the next slice need not begin at their beginning."""


class ShardReader:
    """The windows of one sequence of documents, over and over: position p is window p modulo their number.

    The state is one pass over the documents: the number of windows taken from it, and the last of them.
    """

    def __init__(self, documents: Pass, context: int, name: str) -> None:
        self._documents, self._context, self._name = documents, context, name
        self.size: int | None = None
        """Windows of the whole sequence; None until its end has been reached."""
        self.tokens_seen = 0
        self._rewind()

    def _rewind(self) -> None:
        self.tokens_seen = 0
        self._windows = pack(self._counted(self._documents()), self._context)
        self._taken = 0
        self._last: Tokens | None = None

    def _counted(self, documents: Iterator[Tokens]) -> Iterator[Tokens]:
        for tokens in documents:
            self.tokens_seen += len(tokens)
            yield tokens

    def window(self, position: int) -> Tokens | None:
        """Window int32 [L + 1]; None if the sequence has not one. A smaller position starts a new pass."""
        if self.size == 0:
            return None
        target = position if self.size is None else position % self.size
        if target < self._taken - 1:
            self._rewind()
        while self._taken <= target:
            window = self._next_window()
            if window is None:
                return self._window_after_the_end(position)
            self._last = window
            self._taken += 1
        return self._last

    def _next_window(self) -> Tokens | None:
        try:
            return next(self._windows, None)
        except BaseException:
            # A generator that raised looks exhausted; the next read must not mistake that for the end.
            self._rewind()
            raise

    def _window_after_the_end(self, position: int) -> Tokens | None:
        self.size = self._taken
        if self.size:
            log.warning("the %s ends after %d samples; they are used again", self._name, self.size)
        return self.window(position)


class StreamedSplit:
    """The windows of shards, dealt in slices. With one shard, ordinal j is window j of it, over all epochs.

    Shards without a window are passed over. A shard that ends earlier than others is used again earlier.

    Raises (when read) HetnodeError DATA_TOO_SMALL if no shard has a window.
    """

    def __init__(self, shards: Sequence[Pass], context: int, seed: int, name: str) -> None:
        self._shards, self._context, self._seed, self._name = shards, context, seed, name
        self._open: OrderedDict[int, ShardReader] = OrderedDict()
        self._empty: dict[int, int] = {}
        """Tokens of the shards that have no window."""

    def read(self, ordinals: Ordinals) -> Samples:
        # In ascending order, because then one pass is enough.
        windows = {j: self._window(j) for j in sorted(set(ordinals))}
        if not windows:
            return np.empty((0, self._context + 1), dtype=np.int32)
        return np.stack([windows[j] for j in ordinals])

    def _window(self, ordinal: int) -> Tokens:
        if ordinal < 0:
            raise ValueError(f"the ordinal {ordinal} is negative")
        count = len(self._shards)
        turn, offset = divmod(ordinal, SLICE)
        passes, first = window_of(turn, count, self._seed) if count else (0, 0)
        for index in ((first + step) % count for step in range(count)):
            if index not in self._empty:
                reader = self._reader(index)
                window = reader.window(passes * SLICE + offset)
                if window is not None:
                    return window
                self._empty[index] = reader.tokens_seen
        raise too_small(self._name, max(self._empty.values(), default=0), self._context)

    def _reader(self, index: int) -> ShardReader:
        if index not in self._open:
            of = f", shard {index + 1} of {len(self._shards)}," if len(self._shards) > 1 else ""
            self._open[index] = ShardReader(self._shards[index], self._context, self._name + of)
            if len(self._open) > _MOST_OPEN:
                self._open.popitem(last=False)
        self._open.move_to_end(index)
        return self._open[index]


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
