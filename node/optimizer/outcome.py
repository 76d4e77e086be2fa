"""What a round commits for one stage: payloads that were gathered, or the result of reducers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from node.optimizer.received import ReceivedPayloads, sha256_of
from protocol.algorithm.clipping import SentTensor, clipping_scales, payload_norm
from protocol.algorithm.topk import SparseTensor
from protocol.reduction.partition import PartRange
from protocol.reduction.parts import ReductionLayout, decode_result
from protocol.reduction.pieces import Piece, ReducedTensor, piece_of
from protocol.wire.payload_codec import PayloadLayout, decode

WeightedPayload = tuple[bytes, float]
"""A payload, and the weight of the replica that sent it."""


@dataclass(frozen=True)
class ReducedResult:
    """The result of all reducers of a round (protocol.reduction.parts).

    Attributes:
        missing: parts of this replica's own payload that their reducers have not counted.
    """

    data: bytes
    missing: tuple[PartRange, ...] = ()


Outcome = Sequence[WeightedPayload] | ReducedResult
"""Payloads in the order of the manifest, or the result of the reducers."""


def contents_of(
    received: ReceivedPayloads, outcome: Outcome
) -> tuple[Sequence[Mapping[str, SentTensor]], list[float]]:
    """What outer_step.apply_update applies, with its weights. Raises HetnodeError PAYLOAD_CORRUPT."""
    if isinstance(outcome, ReducedResult):
        layout = received.layout
        return [decode_result(ReductionLayout(layout.shapes, layout.outer), outcome.data)], [1.0]
    return [received.decoded(payload) for payload, _ in outcome], [weight for _, weight in outcome]


def left_out(
    layout: PayloadLayout, outcome: Outcome, own: bytes, contents: Sequence[Mapping[str, SentTensor]]
) -> tuple[Mapping[str, SentTensor], float]:
    """What the outcome has not applied of the payload `own`, and the share of it: 0 for nothing.

    That is what clipping removed, or the parts that reducers missed. What a reducer clips is not known here.

    Args:
        contents: of the outcome, as :func:`contents_of`.
    """
    if not isinstance(outcome, ReducedResult):
        mine = [sha256_of(payload) for payload, _ in outcome].index(sha256_of(own))
        return contents[mine], 1.0 - clipping_scales([payload_norm(each) for each in contents])[mine]
    if not outcome.missing:
        return {}, 0.0
    sparse, chunks = decode(layout, own), ReductionLayout(layout.shapes, layout.outer).chunks
    found: dict[str, list[tuple[Piece, SparseTensor]]] = {name: [] for name in layout.shapes}
    for part in outcome.missing:
        for piece in chunks.pieces(part):
            found[piece.tensor].append((piece, piece_of(sparse[piece.tensor], piece)))
    return {name: ReducedTensor(tuple(pieces)) for name, pieces in found.items()}, 1.0
