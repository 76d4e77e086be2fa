"""The samples of a run: windows of token ids, addressed by ordinal.

Documents are tokenized and concatenated, each followed by the tokenizer's separator, and cut into windows of
L + 1 tokens that overlap by one: inputs are ``[:, :-1]``, targets ``[:, 1:]``. An incomplete last window is
dropped. Training and validation documents are two separate sequences.

A source in memory is read in an order that depends on the seed, a streamed source in its own order. In both
cases equal (spec, ordinals) give equal samples, independent of earlier reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from node.data.permutation import window_of
from node.data.sources import Source, open_source
from node.data.tokenizer import Tokenizer, Tokens, check_tokenizer
from protocol.errors import ErrorCode, HetnodeError
from protocol.spec.run import RunSpec

Samples = np.ndarray[tuple[int, int], np.dtype[np.int32]]
Ordinals = range | Sequence[int]


class Split(Protocol):
    """One endless sequence of windows: after the last one the next epoch begins."""

    def read(self, ordinals: Ordinals) -> Samples:
        """Windows int32 [n, L + 1], in the order asked for."""
        ...


@dataclass(frozen=True)
class SampleStream:
    """Training and validation samples of a run."""

    training: Split
    held_out: Split

    def read(self, ordinals: Ordinals) -> Samples:
        """Training samples, int32 [n, L + 1]. Ordinals count the samples of the whole run from 0.

        A streamed source is read forward: skipped samples are read, too, and a smaller ordinal than before
        starts a new pass over the data. Raises DATA_UNREADABLE if the source fails.
        """
        return self.training.read(ordinals)

    def validation(self, count: int) -> Samples:
        """The first `count` validation windows, int32 [count, L + 1]: the same in every run of this data.

        A smaller split repeats its windows. Raises DATA_UNREADABLE if the source fails.
        """
        return self.held_out.read(range(count))


def open_stream(spec: RunSpec, source: str | None = None, tokenizer: str | None = None) -> SampleStream:
    """Open the data of a run and make sure that both splits have a window.

    Args:
        spec: the run.
        source: the location of the same data on this node; None: ``spec.data.source``.
        tokenizer: the path of the run's tokenizer.json on this node; None: ``spec.data.tokenizer``.

    Raises:
        HetnodeError: DATA_UNREADABLE, DATA_TOO_SMALL, TOKENIZER_UNREADABLE, TOKENIZER_MISMATCH or
            MISSING_EXTRA.
    """
    encoder = check_tokenizer(spec, tokenizer)
    origin = open_source(source or spec.data.source, spec.data.text_field)
    stream = (_streamed if origin.streamed else _loaded)(origin, encoder, spec)
    stream.training.read(range(1))
    stream.held_out.read(range(1))
    return stream


def _loaded(source: Source, tokenizer: Tokenizer, spec: RunSpec) -> SampleStream:
    """Both splits, tokenized in one pass. Ids have the smallest element type that can hold all of them."""
    dtype = next(t for t in (np.uint8, np.uint16, np.int32) if tokenizer.vocabulary - 1 <= np.iinfo(t).max)
    pieces: dict[bool, list[np.ndarray]] = {False: [], True: []}
    for document in source.documents():
        ids = (tokenizer.encode(document.text), tokenizer.separator)
        pieces[document.held_out] += [each.astype(dtype) for each in ids]

    def tokens(held_out: bool) -> np.ndarray:
        return np.concatenate([np.empty(0, dtype), *pieces[held_out]])

    # The order of validation windows does not depend on the seed: runs with equal data are comparable.
    return SampleStream(
        LoadedSplit(tokens(False), spec.model.context, spec.seed, f"training data of {source.name}"),
        LoadedSplit(tokens(True), spec.model.context, 0, f"validation data of {source.name}"),
    )


def _streamed(source: Source, tokenizer: Tokenizer, spec: RunSpec) -> SampleStream:
    def tokens(held_out: bool) -> Callable[[], Iterator[Tokens]]:
        def one_pass() -> Iterator[Tokens]:
            for document in source.documents():
                if document.held_out is held_out:
                    yield np.concatenate([tokenizer.encode(document.text), tokenizer.separator])

        return one_pass

    return SampleStream(
        StreamedSplit(tokens(False), spec.model.context, f"training data of {source.name}"),
        StreamedSplit(tokens(True), spec.model.context, f"validation data of {source.name}"),
    )


class LoadedSplit:
    """Tokens in memory; each epoch visits every window once, in an order keyed by (seed, epoch)."""

    def __init__(self, tokens: np.ndarray, context: int, seed: int, name: str) -> None:
        self._size = max(len(tokens) - 1, 0) // context
        if not self._size:
            raise too_small(name, len(tokens), context)
        self._tokens, self._context, self._seed = tokens, context, seed

    def read(self, ordinals: Ordinals) -> Samples:
        windows = np.array([window_of(j, self._size, self._seed)[1] for j in ordinals], dtype=np.int64)
        at = windows[:, None] * self._context + np.arange(self._context + 1)
        samples: Samples = self._tokens[at].astype(np.int32)
        return samples


class StreamedSplit:
    """Windows that are packed while they are read: ordinal j is window j of the stream, over all epochs.

    The state is one pass over the data: the number of windows taken from it, and the last of them.
    """

    def __init__(self, documents: Callable[[], Iterator[Tokens]], context: int, name: str) -> None:
        self._documents, self._context, self._name = documents, context, name
        self._size: int | None = None
        self._rewind()

    def _rewind(self) -> None:
        self._tokens_seen = 0
        self._windows = pack(self._counted(self._documents()), self._context)
        self._taken = 0
        self._last: Tokens | None = None

    def _counted(self, documents: Iterator[Tokens]) -> Iterator[Tokens]:
        for tokens in documents:
            self._tokens_seen += len(tokens)
            yield tokens

    def read(self, ordinals: Ordinals) -> Samples:
        # In ascending order, because then one pass is enough.
        windows = {j: self._window(j) for j in sorted(set(ordinals))}
        if not windows:
            return np.empty((0, self._context + 1), dtype=np.int32)
        return np.stack([windows[j] for j in ordinals])

    def _window(self, ordinal: int) -> Tokens:
        if ordinal < 0:
            raise ValueError(f"the ordinal {ordinal} is negative")
        target = ordinal if self._size is None else ordinal % self._size
        if target < self._taken - 1:
            self._rewind()
        while self._taken <= target:
            window = self._next_window()
            if window is None:
                return self._window_after_the_end(ordinal)
            self._last = window
            self._taken += 1
        assert self._last is not None
        return self._last

    def _next_window(self) -> Tokens | None:
        try:
            return next(self._windows, None)
        except BaseException:
            # A generator that raised looks exhausted; the next read must not mistake that for the end.
            self._rewind()
            raise

    def _window_after_the_end(self, ordinal: int) -> Tokens:
        """Window of a later epoch. The end of the data was reached, so the size of an epoch is now known."""
        if not self._taken:
            raise too_small(self._name, self._tokens_seen, self._context)
        self._size = self._taken
        return self._window(ordinal)


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
    return HetnodeError(
        ErrorCode.DATA_TOO_SMALL,
        f"The {name} has {found} tokens; one sample needs {context + 1}.",
        "Use more text (the split needs several documents) or a smaller model.context.",
    )
