"""AdamW's moments are kept, given back, or start anew with care."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from node.core.optimizer.inner import InnerOptimizer, StageOptimizer
from protocol.spec.fixed import COLD_STEPS
from tests.support.reference import small_spec

RATE = 0.01


class Stage:
    def __init__(self, undecayed: str = "emb", **inner: float) -> None:
        generator = torch.Generator().manual_seed(0)
        shapes = {"emb": (5, 3), "wq": (3, 3), "norm": (3,)}
        self.parameters = {
            name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()
        }
        spec = small_spec(inner={"weight_decay": 0.0, **inner})
        self.optimizer = StageOptimizer(spec, self.parameters, {undecayed})

    def step(self, gradient: float = 1.0) -> dict[str, Tensor]:
        """Returns by how much the parameters have changed."""
        before = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        for parameter in self.parameters.values():
            parameter.grad = torch.full_like(parameter, gradient)
        self.optimizer.step(RATE)
        return {name: parameter.detach() - before[name] for name, parameter in self.parameters.items()}

    def length(self) -> float:
        """Of a step along a constant gradient: the rate, whatever the gradient's size."""
        return -float(self.step()["wq"].mean())


def test_the_first_steps_of_a_run_have_the_full_rate() -> None:
    stage = Stage()
    stage.optimizer.begin_round(1)
    assert [stage.length() for _ in range(3)] == pytest.approx([RATE] * 3, rel=1e-4)
    stage.optimizer.begin_round(2)
    assert stage.length() == pytest.approx(RATE, rel=1e-4)


def test_moments_that_start_in_mid_run_raise_the_rate_step_by_step_across_rounds() -> None:
    stage = Stage()
    stage.optimizer.begin_round(7)
    lengths = [stage.length() for _ in range(2)]
    stage.optimizer.begin_round(8)
    lengths += [stage.length() for _ in range(4)]
    assert lengths == pytest.approx([RATE * part for part in (0.2, 0.4, 0.6, 0.8, 1.0, 1.0)], rel=1e-4)


def test_moments_are_cold_again_after_they_were_given_up() -> None:
    stage = Stage()
    stage.optimizer.begin_round(1)
    stage.step()
    stage.optimizer.load_state_dict(None)
    assert stage.optimizer.state_dict() is None
    stage.optimizer.begin_round(1)
    assert stage.length() == pytest.approx(RATE, rel=1e-4), "still the start of the run"
    stage.optimizer.load_state_dict(None)
    stage.optimizer.begin_round(2)
    assert stage.length() == pytest.approx(RATE / COLD_STEPS, rel=1e-4)


def test_moments_that_are_given_up_in_the_middle_of_a_phase_are_cold_at_once() -> None:
    """A rollback comes while steps of the next round are trained already, where rounds overlap."""
    stage = Stage()
    stage.optimizer.begin_round(9)
    for _ in range(COLD_STEPS + 1):
        stage.step()
    stage.optimizer.load_state_dict(None)
    assert stage.length() == pytest.approx(RATE / COLD_STEPS, rel=1e-4)


@pytest.mark.parametrize("first_round", [1, 5])
def test_restored_moments_go_on_as_if_nothing_had_happened(first_round: int) -> None:
    stage, other = Stage(), Stage()
    stage.optimizer.begin_round(first_round)
    for gradient in (1.0, -0.3):
        stage.step(gradient)
    for name, parameter in other.parameters.items():
        parameter.data.copy_(stage.parameters[name].data)
    moments = stage.optimizer.state_dict()
    assert moments is not None
    assert moments["steps"] == 2
    other.optimizer.load_state_dict(moments)
    for each in (stage, other):
        each.optimizer.begin_round(first_round + 1)
        for gradient in (0.5, 2.0, 0.1):
            each.step(gradient)
    assert all(torch.equal(stage.parameters[name], other.parameters[name]) for name in stage.parameters)


def test_weight_decay_acts_on_matrices_and_not_on_those_that_are_spared() -> None:
    stage = Stage(weight_decay=0.5)
    before = {name: parameter.detach().clone() for name, parameter in stage.parameters.items()}
    moved = stage.step(0.0)
    assert not moved["emb"].any()
    assert not moved["norm"].any()
    torch.testing.assert_close(moved["wq"], -RATE * 0.5 * before["wq"])


def test_the_gradient_norm_of_large_parameters_is_exact_to_float32() -> None:
    parameters = {
        "flat": nn.Parameter(torch.empty(70_000)),
        "matrix": nn.Parameter(torch.empty(3000, 1000)),
        "unused": nn.Parameter(torch.empty(3)),
    }
    generator = torch.Generator().manual_seed(0)
    for name in ("flat", "matrix"):
        parameters[name].grad = torch.rand(parameters[name].shape, generator=generator)
    expected = sum(float(p.grad.double().square().sum()) for p in parameters.values() if p.grad is not None)
    inner = InnerOptimizer(small_spec(), {0: parameters}, ())
    assert inner.squared_gradient_norm() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("norm", "scale"), [(0.5, 1.0), (4.0, 0.25)])
def test_gradients_are_clipped_only_above_the_limit(norm: float, scale: float) -> None:
    parameter, plain = (nn.Parameter(torch.ones(2, 2)) for _ in range(2))
    spec = small_spec(inner={"clip_norm": 1.0})
    for each, factor in ((parameter, 1.0), (plain, scale)):
        each.grad = torch.full((2, 2), 0.5) * factor
        InnerOptimizer(spec, {0: {"w": each}}, ()).step(0, norm if factor == 1.0 else 0.0)
    assert parameter.grad is not None
    torch.testing.assert_close(parameter.grad, torch.full((2, 2), 0.5 * scale))
    torch.testing.assert_close(parameter, plain)
