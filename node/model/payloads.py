"""The form of the payloads of a stage."""

from __future__ import annotations

from node.model.shapes import parameter_shapes
from protocol.spec.run import RunSpec
from protocol.wire.payload_codec import PayloadLayout


def payload_layout(spec: RunSpec, stage: int) -> PayloadLayout:
    """The form of every payload of `stage`. ValueError for an unknown stage."""
    return PayloadLayout(parameter_shapes(spec, stage), spec.outer)
