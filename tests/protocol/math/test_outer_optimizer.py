"""The outer optimizers: torch's arithmetic, with the same bits on every machine."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from protocol.math.outer_optimizer import (
    LEAST_MOMENTUM,
    Nesterov,
    OuterOptimizer,
    Sgd,
    committed_shapes,
    outer_optimizer,
    state_name,
)
from protocol.spec.outer import OUTER_OPTIMIZERS, OuterSpec

ROUNDS = 20


def gradients(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(5, 7, generator=generator, dtype=dtype) for _ in range(ROUNDS)]


def run(optimizer: OuterOptimizer, dtype: torch.dtype) -> Tensor:
    parameter = torch.ones(5, 7, dtype=dtype)
    state = {slot: torch.zeros_like(parameter) for slot in OUTER_OPTIMIZERS["nesterov"]}
    for gradient in gradients(dtype):
        parameter, state = optimizer.step(parameter, gradient, state)
    return parameter


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5)])
@pytest.mark.parametrize(
    ("ours", "options"),
    [(Sgd(0.7), {"lr": 0.7}), (Nesterov(0.7, 0.9), {"lr": 0.7, "momentum": 0.9, "nesterov": True})],
    ids=["sgd", "nesterov"],
)
def test_a_run_of_steps_equals_torchs(
    ours: OuterOptimizer, options: dict[str, float], dtype: torch.dtype, tolerance: float
) -> None:
    theirs = nn.Parameter(torch.ones(5, 7, dtype=dtype))
    optimizer = torch.optim.SGD([theirs], **options)  # type: ignore[arg-type]
    for gradient in gradients(dtype):
        theirs.grad = gradient
        optimizer.step()
    torch.testing.assert_close(run(ours, dtype), theirs.detach(), rtol=0, atol=tolerance)


def test_each_operation_of_nesterov_is_rounded_by_itself() -> None:
    """Against numpy, which never fuses a product and a sum."""
    parameter, momentum, rate = torch.ones(5, 7).numpy(), 0.9, 0.7
    velocity = parameter * 0
    f32 = parameter.dtype.type
    for gradient in gradients(torch.float32):
        velocity = velocity * f32(momentum) + gradient.numpy()
        parameter = parameter - (velocity * f32(momentum) + gradient.numpy()) * f32(rate)
    assert torch.equal(run(Nesterov(rate, momentum), torch.float32), torch.from_numpy(parameter))


def test_sgd_at_rate_1_subtracts_the_gradient() -> None:
    parameter, gradient = torch.randn(9), torch.randn(9)
    moved, state = Sgd(1.0).step(parameter, gradient, {})
    assert torch.equal(moved, parameter - gradient)
    assert state == {}


def test_a_step_changes_neither_parameter_nor_gradient_nor_state() -> None:
    tensors = [torch.full((3,), float(number)) for number in range(3)]
    before = [tensor.clone() for tensor in tensors]
    Nesterov(0.7, 0.9).step(tensors[0], tensors[1], {"momentum": tensors[2]})
    assert all(torch.equal(now, then) for now, then in zip(tensors, before, strict=True))


def test_momentum_that_decays_becomes_0_before_it_is_denormal() -> None:
    parameter, state = torch.zeros(1), {"momentum": torch.ones(1)}
    seen = []
    for _ in range(600):
        parameter, state = Nesterov(0.7, 0.9).step(parameter, torch.zeros(1), state)
        seen.append(float(state["momentum"]))
    assert seen[-1] == 0.0
    assert min(value for value in seen if value) >= LEAST_MOMENTUM


def test_the_spec_says_which_optimizer_there_is() -> None:
    assert outer_optimizer(OuterSpec()) == Sgd(1.0)
    assert outer_optimizer(OuterSpec(optimizer="nesterov")) == Nesterov(0.7, 0.9)
    given = OuterSpec(optimizer="nesterov", momentum=0.5, learning_rate=0.3)
    assert outer_optimizer(given) == Nesterov(0.3, 0.5)


@pytest.mark.parametrize("name", OUTER_OPTIMIZERS)
def test_each_optimizer_of_the_specification_keeps_the_state_that_is_named_there(name: str) -> None:
    outer, state = OuterSpec(optimizer=name), dict.fromkeys(OUTER_OPTIMIZERS[name], torch.zeros(3))
    _, after = outer_optimizer(outer).step(torch.ones(3), torch.ones(3), state)
    assert tuple(after) == outer.slots


def test_what_is_committed_has_the_state_behind_its_parameter_in_ascending_order() -> None:
    shapes = {"emb": (4, 2), "0.wq": (2, 2), "head": (3,)}
    assert committed_shapes(shapes, OuterSpec()) == shapes
    found = committed_shapes(shapes, OuterSpec(optimizer="nesterov"))
    assert found[state_name("emb", "momentum")] == (4, 2)
    assert sorted(found) == ["0.wq", "0.wq/momentum", "emb", "emb/momentum", "head", "head/momentum"]
