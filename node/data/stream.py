"""The samples of a run: windows of token ids, addressed by ordinal.

Documents are tokenized and concatenated, each followed by the tokenizer's separator, and cut into windows of
L + 1 tokens that overlap by one: inputs are ``[:, :-1]``, targets ``[:, 1:]``. An incomplete last window is
dropped. Training and validation documents are two separate sequences.

Windows of a source in memory, and shards of a streamed source, are read in an order that depends on the seed.
In both cases equal (spec, ordinals) give equal samples, independent of earlier reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Protocol

import numpy as np

from node.data.permutation import window_of
from node.data.sources import Pass, TextSource, not_named, open_source
from node.data.streamed import Ordinals, Samples, StreamedSplit, too_small
from node.data.tokenizer import BYTES, Tokenizer, Tokens, check_tokenizer
from protocol.spec.run import RunSpec


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

        A streamed source opens the shards in which the samples are, and no other (node/data/streamed.py).
        Raises DATA_UNREADABLE if the source fails.
        """
        return self.training.read(ordinals)

    def validation(self, count: int) -> Samples:
        """The first `count` validation windows, int32 [count, L + 1]: the same in every run of this data.

        A smaller split repeats its windows. Raises DATA_UNREADABLE if the source fails.
        """
        return self.held_out.read(range(count))


def open_stream(
    spec: RunSpec, source: str | None = None, tokenizer: str | None = None, is_own_run: bool = True
) -> SampleStream:
    """Open the data of a run and make sure that both splits have a window.

    Args:
        spec: the run.
        source: the location of the same data on this node; None: ``spec.data.source``.
        tokenizer: the path of the run's tokenizer.json on this node; None: ``spec.data.tokenizer``.
        is_own_run: whether the owner of this machine has named what is in `spec`. A run of somebody else
            opens only `source`, `tokenizer`, what is built in, and the hub.

    Raises:
        HetnodeError: DATA_NOT_NAMED before anything is read; DATA_UNREADABLE, DATA_TOO_SMALL,
            TOKENIZER_UNREADABLE, TOKENIZER_MISMATCH or MISSING_EXTRA.
    """
    origin = open_source(source or spec.data.source, spec.data.text_field, is_own_run or source is not None)
    if not is_own_run and tokenizer is None and spec.data.tokenizer != BYTES:
        raise not_named(f"its tokenizer from {spec.data.tokenizer}", "--tokenizer", spec.data.tokenizer)
    encoder = check_tokenizer(spec, tokenizer)
    stream = (_streamed if origin.streamed else _loaded)(origin, encoder, spec)
    stream.training.read(range(1))
    stream.held_out.read(range(1))
    return stream


def _loaded(source: TextSource, tokenizer: Tokenizer, spec: RunSpec) -> SampleStream:
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


def _streamed(source: TextSource, tokenizer: Tokenizer, spec: RunSpec) -> SampleStream:
    shards = source.shards()

    def tokens(held_out: bool, shards: Sequence[Pass]) -> Iterator[Tokens]:
        for document in chain.from_iterable(shard() for shard in shards):
            if document.held_out is held_out:
                yield np.concatenate([tokenizer.encode(document.text), tokenizer.separator])

    training = [partial(tokens, False, [shard]) for shard in shards]
    # Validation windows are few, and the same in every run: they come from the first shards.
    held_out = [partial(tokens, True, shards)]
    return SampleStream(
        StreamedSplit(training, spec.model.context, spec.seed, f"training data of {source.name}"),
        StreamedSplit(held_out, spec.model.context, 0, f"validation data of {source.name}"),
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
