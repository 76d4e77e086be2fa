"""The bytes that reduction in parts sends in a round; protocol.spec.exchanges registers the sentence."""

from __future__ import annotations

from node.core.model.shapes import parameter_shapes
from protocol.math.payload_layout import PayloadLayout
from protocol.spec.run import RunSpec


def volume_text(spec: RunSpec) -> str:
    """What a replica sends and receives, by the options of the run.

    Of R equal replicas it is (R - 1) / R of that; each part has its own header and magnitudes.
    """
    shapes = [parameter_shapes(spec, stage) for stage in range(spec.swarm.stages)]
    own = sum(PayloadLayout(each, spec.outer).nbytes for each in shapes)
    result = sum(PayloadLayout(each, spec.outer.of_result).nbytes for each in shapes)
    return f"reduced: about {(2 * own + result) / 1e6:,.1f} MB up and as much down per replica and round"
