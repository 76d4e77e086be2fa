"""How well a model predicts text: loss, perplexity and bits per byte, in one process.

Text is cut as in training (node.data.stream): the tokenizer's separator follows each document, and
windows of L + 1 tokens overlap by one. Every token except the first of the sequence is predicted once,
from at most L tokens before it in its window. An incomplete last window is not measured.

Bytes make the values of different tokenizers comparable. They are the UTF-8 bytes of the text that the
predicted tokens encode (`Tokenizer.encode_counted`); a separator counts its newline, or 0 if it is a special
token. With the byte tokenizer, bits per byte = loss / ln 2.

Shapes: b micro-batch, L tokens, d width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain, islice

import numpy as np
import torch
from torch import Tensor

from node.checkpoint.global_model import Checkpoint
from node.data.sources import SourceShard, open_source
from node.data.stream import LoadedSplit, TokenFile, is_streamed
from node.data.streamed import Samples, pack, too_small
from node.data.tokenizer import Tokenizer, check_tokenizer
from node.experiment.in_process_replica import plan_of
from node.experiment.results import perplexity
from node.generate import next_token_loss, whole_model
from protocol.codec.activation import pack_activation, unpack_activation
from protocol.errors import ErrorCode, HetnodeError
from protocol.math.subspace import ReceivingEnd, SendingEnd, orthonormal_basis
from protocol.spec.data import DataSource, DataSpec
from protocol.spec.run import RunSpec
from protocol.spec.sections import SwarmSpec

Counted = Iterator[tuple[np.ndarray, np.ndarray]]
"""For each document or window: the token ids, and the number of bytes that each of them encodes."""

TOKENS_TOGETHER = 4096


class ForwardMode(StrEnum):
    """Whether activations pass the compressed links of a pipeline replica."""

    UNCOMPRESSED = "uncompressed"
    COMPRESSED = "compressed"


class Documents(StrEnum):
    """Which documents of a source count: those that runs hold out for validation, or all."""

    HELD_OUT = "held-out"
    ALL = "all"


@dataclass(frozen=True)
class Evaluation:
    """A measurement: mean cross-entropy in nats per token, predicted tokens, and bytes of their text."""

    loss: float
    tokens: int
    bytes: int

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite if it exceeds all floats."""
        return perplexity(self.loss)

    @property
    def bits_per_byte(self) -> float:
        """NaN if the tokens encode no text."""
        return self.loss * self.tokens / math.log(2) / self.bytes if self.bytes else math.nan


def evaluate(
    checkpoint: Checkpoint,
    source: str,
    documents: Documents = Documents.HELD_OUT,
    mode: ForwardMode = ForwardMode.UNCOMPRESSED,
    batches: int | None = None,
    tokenizer_path: str | None = None,
    progress: Callable[[Evaluation], None] = lambda _: None,
    text_field: str = "",
) -> Evaluation:
    """Measure a model on text, in float32.

    Held-out windows come in the order of validation. So the run's own source with `batches` equal to
    `data.validation_batches` gives the loss of the run, if it has that many windows.

    Args:
        checkpoint: all stages of a run, on the device that computes.
        source: as :func:`open_source`.
        mode: COMPRESSED is the forward mode of a pipeline replica: with the projection, k and element type of
            the run's links, between the same stages, and with the embedding of the checkpoint.
        batches: micro-batches of the run's size; None takes all windows.
        progress: called after every forward pass with the measurement so far.
        text_field: key of the text in records; "": that of the run.

    Raises:
        HetnodeError: CHECKPOINT_MISSING (stages); BAD_OPTION for COMPRESSED if the run has no links,
            or without `batches` for a streamed source; the errors of the source and the tokenizer.
    """
    spec = checkpoint.spec
    tokenizer = check_tokenizer(spec, tokenizer_path)
    origin = open_source(source, text_field or spec.data.text_field)
    shards = origin.shards()
    if batches is None and is_streamed(shards):
        raise HetnodeError(
            ErrorCode.BAD_OPTION, f"The source {source} is streamed and may have no end.", "Give --batches."
        )
    forward = whole_model(checkpoint) if mode is ForwardMode.UNCOMPRESSED else _through_links(checkpoint)
    device = checkpoint.stages[0]["emb"].device
    result = Evaluation(math.nan, 0, 0)
    nats = 0.0
    most = None if batches is None else batches * spec.inner.microbatch_size
    for samples, nbytes in _batches(spec, origin.name, shards, tokenizer, documents, most):
        sample_bl = torch.from_numpy(samples).long().to(device)
        with torch.inference_mode():
            loss = next_token_loss(forward(sample_bl[:, :-1]).float(), sample_bl[:, 1:]).item()
        count = sample_bl[:, 1:].numel()
        nats += loss * count
        tokens = result.tokens + count
        result = Evaluation(nats / tokens, tokens, result.bytes + int(nbytes[:, 1:].sum()))
        progress(result)
    return result


def measured_source(data: DataSpec, chosen: str | None) -> tuple[DataSource, bool]:
    """What to measure on, and whether all of it is for that.

    `chosen` is the name of one of the run's sources, or another source. Raises HetnodeError BAD_OPTION
    without it, where the run is measured on several.
    """
    measured = data.measured
    if chosen is None and len(measured) > 1:
        names = ", ".join(each.name for each in measured)
        cause, remedy = f"The run has several sources: {names}.", f"Choose: --data {measured[0].name}."
        raise HetnodeError(ErrorCode.BAD_OPTION, cause, remedy)
    named = {each.name: each for each in data.all_sources if each.name}
    if chosen is not None and chosen not in named:
        return DataSource.model_construct(source=chosen), False
    found = measured[0] if chosen is None else named[chosen]
    return found, found not in data.sources


def _batches(
    spec: RunSpec,
    name: str,
    shards: Sequence[SourceShard],
    tokenizer: Tokenizer,
    documents: Documents,
    most: int | None,
) -> Iterator[tuple[Samples, Samples]]:
    """At most `most` windows [b, L + 1] of ids and their bytes, in batches of a size that computes fast."""

    def counted() -> Counted:
        for document in chain.from_iterable(shard.documents() for shard in shards):
            if documents is Documents.ALL or document.held_out:
                ids, nbytes = tokenizer.encode_counted(document.text)
                ids = np.concatenate([ids, tokenizer.separator])
                yield ids, np.concatenate([nbytes, tokenizer.separator_bytes])

    arrange = _in_order if is_streamed(shards) else _as_validated
    windows = islice(arrange(counted(), spec.model.context, f"data of {name}"), most)
    together = max(1, TOKENS_TOGETHER // spec.model.context)
    while batch := list(islice(windows, together)):
        ids, nbytes = (np.stack(parts) for parts in zip(*batch, strict=True))
        yield ids, nbytes


def _as_validated(documents: Counted, context: int, name: str) -> Counted:
    """All windows of a source, in the order in which a run validates if it counts them."""
    files = [TokenFile(np.int32, name) for _ in range(2)]
    for document in documents:
        for file, part in zip(files, document, strict=True):
            file.append(part)
    ids, nbytes = (file.tokens() for file in files)
    splits = [LoadedSplit(each, context, 0, name) for each in (ids, nbytes)]
    for ordinal in range(max(1, (len(ids) - 1) // context)):
        yield splits[0].read([ordinal])[0], splits[1].read([ordinal])[0]


def _in_order(documents: Counted, context: int, name: str) -> Counted:
    """All windows of a streamed source, in its order."""
    found = 0

    def joined() -> Iterator[np.ndarray]:
        nonlocal found
        for ids, nbytes in documents:
            found += len(ids)
            # One array holds both, so that they are cut at the same positions.
            yield ids.astype(np.int64) | nbytes.astype(np.int64) << 32

    for both in pack(joined(), context):
        yield (both & 0xFFFFFFFF).astype(np.int32), (both >> 32).astype(np.int32)
    if found <= context:
        raise too_small(name, found, context)


def _through_links(checkpoint: Checkpoint) -> Callable[[Tensor], Tensor]:
    """The whole model with the run's links between the members of a pipeline: ids [b, L] -> [b, L, V]."""
    spec = checkpoint.spec
    if spec.swarm.stages < 2:
        raise HetnodeError(
            ErrorCode.BAD_OPTION, "The run has one stage, so no link.", "Use --mode uncompressed."
        )
    if spec.link.table:
        raise HetnodeError(
            ErrorCode.BAD_OPTION,
            "Links of this run add tables (link.table) that its replicas keep to themselves; a checkpoint of "
            "the run has none.",
            "Use --mode uncompressed: that model needs no tables.",
        )
    stages = whole_model(checkpoint).stages
    embedding = checkpoint.stages[0]["emb"]
    basis_dd = orthonormal_basis(spec.model.width, spec.seed).to(embedding.device)
    upper = SendingEnd(spec.link.k, basis_dd)
    lower = ReceivingEnd(spec.link.k, basis_dd, embedding)
    swarm = SwarmSpec.model_validate({**spec.swarm.model_dump(), "replicas": 0, "pipelines": 1})
    chain = plan_of(spec.model_copy(update={"swarm": swarm})).replicas[0]
    before_link = {member.stages.stop - 1 for member in chain.members[:-1]}

    def forward(ids_bl: Tensor) -> Tensor:
        x = ids_bl
        for index, stage in enumerate(stages):
            x = stage(x, ids_bl=ids_bl)
            if index in before_link:
                sent = upper.compress_forward(x)
                packed = pack_activation("activation", sent, spec.link.dtype)
                received = unpack_activation(*packed, "activation", tuple(sent.shape), spec.link.dtype)
                x = lower.expand_forward(received.to(x.device), ids_bl)
        return x

    return forward
