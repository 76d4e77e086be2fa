"""The samples of a run: windows of token ids, addressed by ordinal.

Documents are tokenized and concatenated, with the tokenizer's separator after each, and cut into windows of
L + 1 tokens that overlap by one: inputs are ``[:, :-1]``, targets ``[:, 1:]``. What is left over at the end
of the data is dropped. The training and the validation documents are two such sequences.

What fits in memory is addressed at random in a keyed order; what is streamed is addressed in its own order.
Both promise: equal (spec, ordinals) give equal samples, whatever was read before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from node.data.shards import place
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
    """What a worker trains on and is measured on."""

    training: Split
    held_out: Split

    def read(self, ordinals: Ordinals) -> Samples:
        """Training samples, int32 [n, L + 1]. Ordinals count the samples of the whole run from 0.

        A streamed source is read forward: ascending ordinals cost what they skip, a step back costs a new
        pass from the start of the data. Raises DATA_UNREADABLE where the source fails underneath.
        """
        return self.training.read(ordinals)

    def validation(self, count: int) -> Samples:
        """The first `count` validation windows, int32 [count, L + 1]: the same in every run of this data.

        A split that has fewer gives them again from the start. Raises DATA_UNREADABLE as `read` does.
        """
        return self.held_out.read(range(count))


def open_stream(spec: RunSpec, source: str | None = None, tokenizer: str | None = None) -> SampleStream:
    """Open the data of a run and make sure that both splits have a window.

    Args:
        spec: the run.
        source: this node's own location of the same data, where it differs from ``spec.data.source``.
        tokenizer: this node's own copy of the run's tokenizer.json, likewise.

    Raises:
        HetnodeError: DATA_UNREADABLE, DATA_TOO_SMALL, TOKENIZER_UNREADABLE or TOKENIZER_MISMATCH.
    """
    encoder = check_tokenizer(spec, tokenizer)
    origin = open_source(source or spec.data.source, spec.data.text_field)
    stream = (_streamed if origin.streamed else _loaded)(origin, encoder, spec)
    stream.training.read(range(1))
    stream.held_out.read(range(1))
    return stream


def _loaded(source: Source, tokenizer: Tokenizer, spec: RunSpec) -> SampleStream:
    """Both splits, tokenized in one pass and kept in the smallest element type that holds every id."""
    dtype = next(t for t in (np.uint8, np.uint16, np.int32) if tokenizer.vocabulary - 1 <= np.iinfo(t).max)
    pieces: dict[bool, list[np.ndarray]] = {False: [], True: []}
    for document in source.documents():
        pieces[document.held_out] += [
            tokenizer.encode(document.text).astype(dtype),
            tokenizer.separator.astype(dtype),
        ]

    def tokens(held_out: bool) -> np.ndarray:
        return np.concatenate([np.empty(0, dtype), *pieces[held_out]])

    # The order of validation windows does not follow the seed: runs of one data set stay comparable.
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
        self._tokens = tokens
        self._context = context
        self._seed = seed

    def read(self, ordinals: Ordinals) -> Samples:
        windows = np.array([place(j, self._size, self._seed)[1] for j in ordinals], dtype=np.int64)
        at = windows[:, None] * self._context + np.arange(self._context + 1)
        samples: Samples = self._tokens[at].astype(np.int32)
        return samples


class StreamedSplit:
    """Packed on the fly: ordinal j is the j-th window of the stream, counted on through the epochs.

    The only state is one pass over the data: how many of its windows were taken, and the last of them.
    """

    def __init__(self, documents: Callable[[], Iterator[Tokens]], context: int, name: str) -> None:
        self._documents = documents
        self._context = context
        self._name = name
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
        # In ascending order, whatever was asked for: one pass serves them all.
        windows = {j: self._window(j) for j in sorted(set(ordinals))}
        if not windows:
            return np.empty((0, self._context + 1), dtype=np.int32)
        return np.stack([windows[j] for j in ordinals])

    def _window(self, ordinal: int) -> Tokens:
        if ordinal < 0:
            raise ValueError(f"no sample has the ordinal {ordinal}")
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
            # A pass that failed looks like one that has ended; the next read must not take it for that.
            self._rewind()
            raise

    def _window_after_the_end(self, ordinal: int) -> Tokens:
        """Now the length of an epoch is known, and `ordinal` lies in a later one."""
        if not self._taken:
            raise too_small(self._name, self._tokens_seen, self._context)
        self._size = self._taken
        return self._window(ordinal)


def pack(documents: Iterable[Tokens], context: int) -> Iterator[Tokens]:
    """Windows of context + 1 tokens, each beginning with the last token of the one before."""
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
