"""What tests look at in a swarm that runs in one process."""

from __future__ import annotations

from torch import Tensor

from node.experiment.in_process_replica import LocalReplica
from node.experiment.in_process_swarm import LocalSwarm


def anchors(swarm: LocalSwarm) -> list[list[str]]:
    """Digests of the anchor of every stage, by replica."""
    return [
        [member.outer[stage].digest() for member in replica.members for stage in member.stages]
        for replica in swarm.replicas
    ]


def parameters(replica: LocalReplica) -> dict[str, Tensor]:
    """Local parameters by their canonical names."""
    return {
        name: parameter.detach()
        for member in replica.members
        for module in member.modules.values()
        for name, parameter in module.canonical_parameters().items()
    }
