"""The form and the size of the payloads of a stage, round by round."""

from __future__ import annotations

from node.model.shapes import parameter_shapes
from protocol.spec.run import RunSpec
from protocol.wire.payload_codec import PayloadLayout


def payload_layout(spec: RunSpec, stage: int, round_number: int) -> PayloadLayout:
    """The form of every payload of `stage` in a round. ValueError for an unknown stage."""
    return PayloadLayout.of_round(parameter_shapes(spec, stage), spec.outer, spec.seed, round_number)


def payload_kinds(spec: RunSpec, stage: int) -> dict[bool, PayloadLayout]:
    """The kinds of payloads of a run by whether the round is a dense one (OuterSpec.is_dense_in).

    Codec and length are those of all rounds of the kind; the mask, and so the header, is that of one.
    """
    rounds = {spec.outer.is_dense_in(each): each for each in (1, spec.outer.dense_every or 1)}
    return {is_dense: payload_layout(spec, stage, each) for is_dense, each in rounds.items()}


def mean_nbytes(spec: RunSpec, stage: int) -> float:
    """Bytes of one payload of `stage`, mean over the rounds."""
    sizes = {is_dense: each.nbytes for is_dense, each in payload_kinds(spec, stage).items()}
    if len(sizes) == 1:
        return float(*sizes.values())
    return sizes[False] + (sizes[True] - sizes[False]) / spec.outer.dense_every


def longest_nbytes(spec: RunSpec, stage: int) -> int:
    """Bytes of the longest payload of `stage`."""
    return max(each.nbytes for each in payload_kinds(spec, stage).values())
