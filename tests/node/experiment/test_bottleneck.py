"""Full replicas that send a share of their microbatches through the projection of links."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from node.experiment.bottleneck import passes
from node.experiment.in_process_replica import LocalReplica
from node.experiment.in_process_swarm import LocalSwarm
from node.experiment.variation import Variation
from node.experiment.variation_check import check
from tests.support.running_replica import spec_of

pytestmark = pytest.mark.usefixtures("one_thread")

PAIR = {"swarm.replicas": 1, "swarm.pipelines": 1, "link.k": 8, "inner.microbatches": 4, "outer.top_k": 0}


def gradients(replica: LocalReplica) -> dict[str, Tensor]:
    return {
        name: parameter.grad.clone()
        for member in replica.members
        for stage in member.stages
        for name, parameter in member.parameters(stage).items()
        if parameter.grad is not None
    }


def accumulated(share: float, index: int = 0, **overrides: Any) -> dict[str, Tensor]:
    """The gradients of a step of the full replica (0) or of the pipeline (1), on the same samples."""
    swarm = LocalSwarm(spec_of(**PAIR, **overrides), variation=Variation(projected_share=share))
    replica = swarm.replicas[index]
    replica.begin_round(1, range(swarm.spec.samples_per_round()))
    replica.accumulate(0)
    return gradients(replica)


@given(st.integers(0, 10_000), st.fractions(0, 1))
def test_the_share_is_spread_evenly(first: int, share: float) -> None:
    count = sum(passes(number, float(share)) for number in range(first, first + 100))
    assert abs(count - 100 * share) <= 1.000001


def test_a_replica_that_projects_everything_has_the_gradients_of_a_pipeline() -> None:
    projected, pipeline = accumulated(1.0), accumulated(1.0, index=1, **{"link.dtype": "fp32"})
    assert projected.keys() == pipeline.keys()
    for name, gradient in pipeline.items():
        torch.testing.assert_close(projected[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_a_share_of_the_microbatches_is_projected() -> None:
    none, half, all_of_them = (accumulated(share)["0.wq"] for share in (0.0, 0.5, 1.0))
    assert not torch.allclose(half, none)
    assert not torch.allclose(half, all_of_them)


def test_validation_is_not_projected() -> None:
    losses = []
    for share in (0.0, 1.0):
        swarm = LocalSwarm(spec_of(**PAIR), variation=Variation(projected_share=share))
        losses.append(swarm.replicas[0].validate())
    assert losses[0] == losses[1]


@pytest.mark.parametrize("overrides", [{"swarm.replicas": 0, "swarm.pipelines": 2}, {"link.k": 0}])
def test_it_needs_full_replicas_and_links_that_compress(overrides: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="projected_share needs"):
        check(spec_of(**{**PAIR, **overrides}), Variation(projected_share=0.5))
