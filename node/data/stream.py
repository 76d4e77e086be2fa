"""The samples of a run: windows of token ids, addressed by ordinal.

Documents are tokenized and concatenated, each followed by the tokenizer's separator, and cut into windows of
L + 1 tokens that overlap by one: inputs are ``[:, :-1]``, targets ``[:, 1:]``. An incomplete last window is
dropped. Training and validation documents are two separate sequences.

A source of up to LARGE bytes is tokenized once, whatever its kind; each epoch has every window once, in
an order that depends on the seed. A larger source is streamed (node/data/streamed.py). In both cases equal
(spec, ordinals) give equal samples, independent of earlier reads.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from tempfile import TemporaryFile, gettempdir

import numpy as np

from node.data.files import LARGE, unreadable
from node.data.mixture import mixed
from node.data.own import checked_locations
from node.data.permutation import window_of
from node.data.prepared import PreparedPart, PreparedReader, PreparedSource, PreparedTokens
from node.data.sources import Document, SourceShard, TextSource, not_named, open_source
from node.data.streamed import OpenReader, Ordinals, Samples, ShardReader, Split, StreamedSplit, too_small
from node.data.tokenizer import BYTES, Tokenizer, Tokens, check_tokenizer
from protocol.errors import ErrorCode, HetnodeError
from protocol.spec.run import RunSpec

log = logging.getLogger(__name__)

_MOST_TOGETHER, _MOST_CHARACTERS = 64, 2**20
"""Documents, and characters but for those of the last one, that are encoded together, on all cores."""
_MOST_QUIET = 2**26
MOST_PASSES = 4
"""Up to so many, text is nearly as good as new ("Scaling data-constrained language models", 2023)."""
TOKEN_BYTES = 8
"""Bytes of tokens for each byte of a file; compressed text has up to 4."""


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


KeptStreams = dict[tuple[str, str, bool], SampleStream]
"""The sources of a run that this process has read, by place, key of the text, and whether it is trained."""


def open_stream(
    spec: RunSpec,
    own: Sequence[str] = (),
    tokenizer: str | None = None,
    is_own_run: bool = True,
    kept: KeptStreams | None = None,
) -> SampleStream:
    """Open the data of a run and make sure that each source has a window, and what is measured another.

    Args:
        spec: the run.
        own: where this node has the same data, as ``--data`` says it (node/data/own.py).
        tokenizer: the path of the run's tokenizer.json on this node; None: ``spec.data.tokenizer``.
        is_own_run: whether the owner of this machine has named what is in `spec`. A run of somebody else
            opens only `own`, `tokenizer`, what is built in, and the hub.
        kept: what was open before the run changed, and then what this call has opened: it need not be read
            again.

    Raises:
        HetnodeError: DATA_NOT_NAMED before anything is read; BAD_OPTION; DATA_UNREADABLE, DATA_TOO_SMALL,
            TOKENIZER_UNREADABLE, TOKENIZER_MISMATCH or MISSING_EXTRA.
    """
    data, count = spec.data, len(spec.data.sources)
    places, found = checked_locations(data, own, is_own_run), []
    for index, (source, (place, may_open_files)) in enumerate(zip(data.all_sources, places, strict=True)):
        field = source.text_field or data.text_field
        found.append(((place, field, index < count), open_source(place, field, may_open_files)))
    if not is_own_run and tokenizer is None and data.tokenizer != BYTES:
        raise not_named(f"its tokenizer from {data.tokenizer}", "--tokenizer", data.tokenizer)
    encoder, before = check_tokenizer(spec, tokenizer), dict(kept or {})
    opened = [(key, before.get(key) or _of_source(origin, encoder, spec, key[2])) for key, origin in found]
    if kept is not None:
        kept.clear()
        kept.update(opened)
    streams = [stream for _, stream in opened]
    trained, measured = streams[:count], streams[count:] or streams
    held_out = [each.held_out for each in measured]
    for split in (*(each.training for each in trained), *held_out):
        split.read(range(1))
    _tell_passes(spec, [each.training for each in trained])
    return SampleStream(
        mixed([each.training for each in trained], data.sources, spec.seed, data),
        # Validation windows do not depend on the seed: runs with equal data are comparable.
        mixed(held_out, data.measured, 0, None),
    )


def _tell_passes(spec: RunSpec, splits: Sequence[Split]) -> None:
    """Warn of sources of a mixture that a run of the planned size reads more than MOST_PASSES times."""
    data = spec.data
    samples = spec.total_steps * spec.global_batch - sum(each.samples for each in data.past or ())
    whole = sum(each.weight for each in data.sources)
    for source, split in zip(data.sources, splits, strict=True):
        if not isinstance(split, LoadedSplit):
            continue
        passes = samples * source.weight / whole / split.size
        if source.name and passes > MOST_PASSES:
            log.warning("%s has %d samples: this run uses each %.0f times", source.name, split.size, passes)


def _of_source(origin: TextSource, encoder: Tokenizer, spec: RunSpec, is_trained: bool) -> SampleStream:
    """Both splits of a source; all of it is held out unless `is_trained`."""
    if origin.prepared:
        return _prepared(origin.prepared, encoder, spec, is_trained)
    shards = origin.shards()
    if not is_trained:
        shards = [replace(each, documents=partial(_all_held_out, each)) for each in shards]
    return (_streamed if is_streamed(shards) else _loaded)(shards, encoder, spec, origin.name)


def _all_held_out(shard: SourceShard) -> Iterator[Document]:
    return (replace(each, held_out=True) for each in shard.documents())


def is_streamed(shards: Sequence[SourceShard] | Sequence[PreparedPart]) -> bool:
    """Whether these shards of a source have more bytes than all nodes of a run tokenize before they train."""
    sizes = [shard.nbytes for shard in shards]
    return None in sizes or sum(size or 0 for size in sizes) > LARGE


def _loaded(shards: Sequence[SourceShard], tokenizer: Tokenizer, spec: RunSpec, name: str) -> SampleStream:
    """Both splits, tokenized in one pass. Ids have the smallest element type that can hold all of them."""
    dtype = next(t for t in (np.uint8, np.uint16, np.int32) if tokenizer.vocabulary - 1 <= np.iinfo(t).max)
    files = {False: TokenFile(dtype, name), True: TokenFile(dtype, name)}
    if (nbytes := sum(shard.nbytes or 0 for shard in shards)) > _MOST_QUIET:
        log.info("tokenizing the %d MB of %s before the first step", nbytes // 10**6, name)
    for held_out, ids in encoded(chain.from_iterable(shard.documents() for shard in shards), tokenizer):
        files[held_out].append(ids)
    # The order of validation windows does not depend on the seed: runs with equal data are comparable.
    training, validation = files[False].tokens(), files[True].tokens()
    of = f"data of {name} ({len(training) + len(validation)} tokens in all)"
    return SampleStream(
        LoadedSplit(training, spec.model.context, spec.seed, f"training {of}"),
        LoadedSplit(validation, spec.model.context, 0, f"validation {of}"),
    )


def encoded(
    documents: Iterable[Document], tokenizer: Tokenizer, most: int = _MOST_TOGETHER
) -> Iterator[tuple[bool, Tokens]]:
    """For each document whether it is held out, and its ids with the separator; `most` together."""
    for batch in _batches(documents, most):
        for document, ids in zip(batch, tokenizer.encode_batch([each.text for each in batch]), strict=True):
            yield document.held_out, np.concatenate([ids, tokenizer.separator])


def _batches(documents: Iterable[Document], most: int) -> Iterator[list[Document]]:
    batch, size = list[Document](), 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if len(batch) == most or size >= _MOST_CHARACTERS:
            yield batch
            batch, size = [], 0
    yield batch


class TokenFile:
    """Tokens in a nameless temporary file, so that memory need not hold them.

    Raises HetnodeError DISK_FULL; DATA_UNREADABLE for more than files of LARGE bytes can have.
    """

    def __init__(self, dtype: type[np.generic], name: str) -> None:
        self._file, self._dtype, self._name, self._nbytes = TemporaryFile(), dtype, name, 0  # noqa: SIM115

    def append(self, ids: Tokens) -> None:
        data = ids.astype(self._dtype).tobytes()
        self._nbytes += len(data)
        if self._nbytes > TOKEN_BYTES * LARGE:
            raise unreadable(self._name, "its files expand without end", "Use another copy of the data.")
        with self._disk():
            self._file.write(data)

    def tokens(self) -> np.ndarray:
        """All of them, read from the file when they are used."""
        with self._disk():
            self._file.flush()
        if not self._nbytes:
            return np.empty(0, self._dtype)
        return np.asarray(np.memmap(self._file, self._dtype, mode="r"))

    @contextmanager
    def _disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise HetnodeError(
                ErrorCode.DISK_FULL,
                f"The tokens of {self._name} cannot be stored in {gettempdir()}: {error}.",
                "Free some space, or set TMPDIR to a folder on another disk.",
            ) from None


def _streamed(shards: Sequence[SourceShard], tokenizer: Tokenizer, spec: RunSpec, name: str) -> SampleStream:
    def tokens(held_out: bool, shards: Sequence[SourceShard]) -> Iterator[Tokens]:
        documents = chain.from_iterable(shard.documents() for shard in shards)
        chosen = (document for document in documents if document.held_out is held_out)
        # Of the few that are held out, no more are looked for than are asked for.
        for _, ids in encoded(chosen, tokenizer, 1 if held_out else _MOST_TOGETHER):
            yield ids

    training = [partial(ShardReader, partial(tokens, False, [shard])) for shard in shards]
    held_out = partial(ShardReader, partial(tokens, True, shards))
    return _dealt(training, [shard.nbytes for shard in shards], held_out, spec, name)


def _dealt(
    training: Sequence[OpenReader],
    sizes: Sequence[int | None],
    held_out: OpenReader,
    spec: RunSpec,
    name: str,
) -> SampleStream:
    context = spec.model.context
    return SampleStream(
        StreamedSplit(training, sizes, context, spec.seed, f"training data of {name}"),
        # Validation windows are few, and the same in every run: the first ones of the first shards, in order.
        StreamedSplit([held_out], [None], context, 0, f"validation data of {name}", most=1),
    )


def _prepared(source: PreparedSource, tokenizer: Tokenizer, spec: RunSpec, is_trained: bool) -> SampleStream:
    """As for the source from which it was prepared: the same tokens in the same order."""
    parts, name, context = source.parts_for(tokenizer), source.name, spec.model.context
    files = [shard for part in parts for shard in part.shards]
    held_out = source.tokens(files, True if is_trained else None)
    if is_streamed(parts):
        training = [partial(PreparedReader, source.tokens(part.shards, False)) for part in parts]
        sizes = [part.nbytes for part in parts]
        return _dealt(training, sizes, partial(PreparedReader, held_out), spec, name)
    return SampleStream(
        LoadedSplit(source.tokens(files, False), context, spec.seed, f"training data of {name}"),
        LoadedSplit(held_out, context, 0, f"validation data of {name}"),
    )


class LoadedSplit:
    """Counted tokens; each epoch visits every window once, in an order keyed by (seed, epoch).

    Raises (when read) HetnodeError DATA_TOO_SMALL without a window.
    """

    def __init__(self, tokens: np.ndarray | PreparedTokens, context: int, seed: int, name: str) -> None:
        self.size = max(len(tokens) - 1, 0) // context
        self._tokens, self._context, self._seed, self._name = tokens, context, seed, name

    def read(self, ordinals: Ordinals) -> Samples:
        if not self.size:
            raise too_small(self._name, len(self._tokens), self._context)
        windows = np.array([window_of(j, self.size, self._seed)[1] for j in ordinals], dtype=np.int64)
        at = windows[:, None] * self._context + np.arange(self._context + 1)
        samples: Samples = self._tokens[at].astype(np.int32)
        return samples
