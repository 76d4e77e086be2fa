"""The form of the payloads of a stage."""

from __future__ import annotations

from node.core.model.shapes import parameter_shapes
from protocol.codec.payload import PayloadLayout
from protocol.spec.run import RunSpec


def payload_layout(spec: RunSpec, stage: int) -> PayloadLayout:
    """The form of every payload of `stage`. ValueError for an unknown stage."""
    return PayloadLayout(parameter_shapes(spec, stage), spec.outer)
