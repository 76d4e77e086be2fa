"""Noise and error feedback of links: what neighbours get is right on average."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from node.experiment.frame_rounding import PreparedSendingEnd, RoundingNoise
from node.experiment.in_process_swarm import LocalSwarm
from node.experiment.link_bases import rotated, rotation
from node.experiment.microbatch_counter import MicrobatchCounter
from node.experiment.variation import Variation
from node.experiment.variation_check import check
from node.worker.phase import InnerPhase
from protocol.algorithm.subspace import SendingEnd, orthonormal_basis
from protocol.spec.run import RunSpec
from protocol.wire.activation_codec import pack_activation, unpack_activation
from tests.support.running_replica import spec_of

pytestmark = pytest.mark.usefixtures("one_thread")


def couple(**overrides: Any) -> RunSpec:
    """A full replica and a pipeline of four members, k 8 of d 32."""
    shape = {"swarm.replicas": 1, "swarm.pipelines": 1, "link.k": 8, "rounds": 4, "link.dtype": "int4"}
    return spec_of(**{**shape, "inner.microbatches": 2, "inner.steps": 1, "outer.top_k": 0, **overrides})


def received(sent: Tensor) -> Tensor:
    return unpack_activation(*pack_activation("x", sent, "int4"), "x", tuple(sent.shape), "int4")


def test_stochastic_rounding_gives_the_value_on_average() -> None:
    x_blk = torch.randn(1, 8, 64, generator=torch.Generator().manual_seed(0))
    x_blk.clamp_(-1.5, 1.5)  # what lies beyond the outermost level is cut off by either rounding
    noise = RoundingNoise((7, 0))
    mean = torch.stack([received(noise.added(x_blk, (1, 0, n))) for n in range(500)]).mean(0)
    nearest = (received(x_blk) - x_blk).abs().mean()
    assert (mean - x_blk).abs().mean() < 0.2 * nearest


def test_noise_depends_on_its_seeds_and_its_frame_alone() -> None:
    x_blk = torch.ones(1, 2, 3)
    noise = RoundingNoise((7, 0))
    assert torch.equal(noise.added(x_blk, (1, 0, 0)), RoundingNoise((7, 0)).added(x_blk, (1, 0, 0)))
    others = [noise.added(x_blk, frame) for frame in ((2, 0, 0), (1, 1, 0), (1, 0, 1))]
    others.append(RoundingNoise((7, 1)).added(x_blk, (1, 0, 0)))
    assert len({each.numpy().tobytes() for each in others}) == 4
    assert not any(torch.equal(each, noise.added(x_blk, (1, 0, 0))) for each in others)


def sending_end(phase: InnerPhase, noise: RoundingNoise | None = None) -> PreparedSendingEnd:
    trainer: Any = SimpleNamespace(phase=phase)
    usual = SendingEnd(8, orthonormal_basis(16, 0))
    return PreparedSendingEnd(usual, MicrobatchCounter(trainer), noise, "int4")


@pytest.mark.parametrize("noise", [None, RoundingNoise((3,))], ids=["nearest", "stochastic"])
def test_with_feedback_the_microbatches_of_a_step_lose_less_together(noise: RoundingNoise | None) -> None:
    phase = InnerPhase(1)
    end = sending_end(phase, noise)
    x_bld = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1))
    exact = SendingEnd(8, orthonormal_basis(16, 0)).compress_forward(x_bld)
    got = [received(end.compress_forward(x_bld)) for _ in range(8)]
    for count in range(1, 9):
        lost = (sum(got[:count], torch.zeros(())) - count * exact).abs().mean()
        assert lost < 2.5 * (received(exact) - exact).abs().mean(), "it does not add up"


def test_feedback_ends_with_its_step_and_is_not_for_validation() -> None:
    phase = InnerPhase(1)
    end = sending_end(phase)
    x_bld = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1))
    first, second = end.compress_forward(x_bld), end.compress_forward(x_bld)
    assert not torch.equal(first, second)
    with torch.inference_mode():
        assert torch.equal(end.compress_forward(x_bld), first)
    phase.steps += 1
    assert torch.equal(end.compress_forward(x_bld), first)


@pytest.mark.parametrize(
    "changes", [{"stochastic_rounding": True}, {"link_feedback": True}], ids=lambda each: next(iter(each))
)
def test_pipelines_alone_are_changed_and_equal_swarms_have_equal_bits(changes: dict[str, Any]) -> None:
    usual, *varied = (LocalSwarm(couple(), variation=Variation(**each)) for each in ({}, changes, changes))
    assert usual.validate() == varied[0].validate()
    reports = [swarm.train_round() for swarm in (usual, *varied)]
    assert reports[1] == reports[2]
    assert varied[0].validate() == varied[1].validate()
    assert reports[0].inner[0] == reports[1].inner[0]
    assert reports[0].inner[1] != reports[1].inner[1]
    assert reports[0].link_bytes == reports[1].link_bytes


@pytest.mark.parametrize("k", [1, 2, 6, 16, 62])
def test_a_rotation_is_orthonormal_and_that_of_hadamard_where_there_is_one(k: int) -> None:
    q_kk = rotation(k, seed=3)
    torch.testing.assert_close(q_kk @ q_kk.T, torch.eye(k), rtol=0, atol=1e-6)
    if k & (k - 1) == 0:
        torch.testing.assert_close(q_kk.abs(), torch.full((k, k), k**-0.5))


def test_a_rotation_spreads_one_large_value_and_keeps_the_subspace() -> None:
    basis_dd = orthonormal_basis(32, 1)
    turned_dd = rotated(basis_dd, 16, seed=2)
    before, after = (each[:, :16] @ each[:, :16].T for each in (basis_dd, turned_dd))
    torch.testing.assert_close(before, after, rtol=0, atol=1e-6)
    assert torch.equal(basis_dd[:, 16:], turned_dd[:, 16:])
    largest = (basis_dd[:, 0] @ turned_dd[:, :16]).abs()
    np.testing.assert_allclose(largest, 0.25, atol=1e-6)


def test_both_ends_of_a_link_rotate_alike() -> None:
    losses = [
        LocalSwarm(couple(**{"link.dtype": "fp32"}), variation=Variation(rotation=each)).train_round()
        for each in (False, True)
    ]
    assert losses[0].inner[1].loss == pytest.approx(losses[1].inner[1].loss, rel=1e-6)
    coarse = [
        LocalSwarm(couple(), variation=Variation(rotation=each, basis_every=1)) for each in (False, True)
    ]
    for _ in range(2):
        reports = [swarm.train_round() for swarm in coarse]
    assert reports[0].inner[1].loss != reports[1].inner[1].loss


@pytest.mark.parametrize(
    ("spec", "changes", "match"),
    [
        ({"link.dtype": "bf16"}, {"stochastic_rounding": True}, "activations and gradients are int4"),
        ({"link.gradient_dtype": "dither3"}, {"stochastic_rounding": True}, "and gradients are int4"),
        ({"swarm.pipelines": 0}, {"link_feedback": True}, "needs links"),
        ({"inner.microbatches": 1}, {"link_feedback": True}, "inner.microbatches is 1"),
        ({"link.k": 0}, {"rotation": True}, "links that compress"),
    ],
)
def test_what_a_specification_does_not_allow_is_refused(
    spec: dict[str, Any], changes: dict[str, Any], match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        check(couple(**spec), Variation(**changes))


def test_a_rotation_has_one_k() -> None:
    with pytest.raises(ValidationError, match="fixed k"):
        Variation(rotation=True, k_by_round=((1, 4),))
