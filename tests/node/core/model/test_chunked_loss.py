"""The loss in chunks is the cross-entropy of the whole logits, and so are its gradients."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from node.core.model.chunked_loss import chunked_loss
from node.generate import next_token_loss

B, L, D, V = 2, 9, 16, 50


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    chance = torch.Generator().manual_seed(0)
    x_bld = torch.randn(B, L, D, generator=chance, dtype=torch.float64).to(dtype).requires_grad_()
    head_vd = torch.randn(V, D, generator=chance, dtype=torch.float64).to(dtype).requires_grad_()
    return x_bld, head_vd, torch.randint(V, (B, L), generator=chance)


@pytest.mark.parametrize("rows", [1, 5, 18, None])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_loss_and_gradients_are_those_of_the_whole_logits(
    rows: int | None, dtype: torch.dtype, tolerance: float
) -> None:
    x_bld, head_vd, targets_bl = inputs(dtype)
    # A gradient other than 1, as of the mean over several microbatches.
    expected = next_token_loss(F.linear(x_bld, head_vd), targets_bl)
    expected_gradients = torch.autograd.grad(expected / 3, (x_bld, head_vd))
    loss = chunked_loss(x_bld, head_vd, targets_bl, rows)
    gradients = torch.autograd.grad(loss / 3, (x_bld, head_vd))
    torch.testing.assert_close(loss, expected, rtol=tolerance, atol=0)
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    with torch.no_grad():
        torch.testing.assert_close(
            chunked_loss(x_bld, head_vd, targets_bl, rows), expected, rtol=tolerance, atol=0
        )


def test_a_target_of_probability_zero_has_a_finite_loss() -> None:
    x_bld, head_vd = torch.tensor([[[1.0]]]), torch.tensor([[1000.0], [-1000.0]])
    assert chunked_loss(x_bld, head_vd, torch.tensor([[1]])) == 2000


@pytest.mark.parametrize("rows", [4, 18])
def test_under_autocast_loss_and_gradients_are_as_close_as_those_of_whole_logits(rows: int) -> None:
    x_bld, head_vd, targets_bl = inputs(torch.float32)
    exact = next_token_loss(F.linear(x_bld, head_vd), targets_bl)
    exact_gradients = torch.autograd.grad(exact, (x_bld, head_vd))
    with torch.autocast("cpu", torch.bfloat16):
        loss = chunked_loss(x_bld, head_vd, targets_bl, rows)
        with torch.no_grad():
            assert chunked_loss(x_bld, head_vd, targets_bl, rows) == loss
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=1e-2)
    for ours, exact_one in zip(torch.autograd.grad(loss, (x_bld, head_vd)), exact_gradients, strict=True):
        assert ours.dtype == torch.float32
        assert (ours - exact_one).norm() < 1e-2 * exact_one.norm()


@pytest.mark.parametrize("trains", [True, False])
def test_logits_exist_for_one_chunk_only(monkeypatch: pytest.MonkeyPatch, trains: bool) -> None:
    plain, shapes = torch.log_softmax, []
    former: list[weakref.ref[Tensor]] = []

    def recording(logits_cv: Tensor, **options: Any) -> Tensor:
        assert not any(each() is not None for each in former), "the chunk before is freed"
        shapes.append(logits_cv.shape)
        found = plain(logits_cv, **options)
        former[:] = weakref.ref(logits_cv), weakref.ref(found)
        return found

    monkeypatch.setattr(torch, "log_softmax", recording)
    with torch.set_grad_enabled(trains):
        loss = chunked_loss(*inputs(torch.float32), rows=8)
    if trains:
        loss.backward()  # type: ignore[no-untyped-call]
    assert shapes == [(8, V), (8, V), (2, V)]
