"""Muon has the bits of torch.optim.Muon, and leaves all but the matrices of layers to AdamW."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from node.core.optimizer import muon
from node.core.optimizer.adamw import AdamW
from node.core.optimizer.muon import MOMENTUM, Muon, orthogonal

OPTIONS = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-6}
HIDDEN = {"0.wq": (7, 5), "0.w_down": (4, 9)}
OTHERS = {"emb": (6, 4), "head": (6, 4), "rows": (3, 4), "0.norm1": (3,)}


def parameters(shapes: dict[str, tuple[int, ...]]) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}


def group(named: dict[str, nn.Parameter]) -> dict[str, object]:
    return {"params": [*named.items()], "weight_decay": 0.1}


def give_gradients(seed: int, *models: dict[str, nn.Parameter]) -> None:
    for name in models[0]:
        gradient = torch.randn(models[0][name].shape, generator=torch.Generator().manual_seed(seed))
        for model in models:
            model[name].grad = gradient.clone()


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch before 2.9 has no Muon")
def test_matrices_have_the_bits_of_torchs_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(muon.PRECISION, "cpu", torch.bfloat16)  # torch's class has no other one
    mine, theirs = parameters(HIDDEN), parameters(HIDDEN)
    ours = Muon([group(mine)], **OPTIONS)
    usual = torch.optim.Muon(
        theirs.values(), lr=0.02, weight_decay=0.1, momentum=MOMENTUM, adjust_lr_fn="match_rms_adamw"
    )
    for step in range(4):
        give_gradients(step, mine, theirs)
        ours.param_groups[0]["lr"] = usual.param_groups[0]["lr"] = 0.02 / (step + 1)
        ours.step()
        usual.step()
    for name, parameter in mine.items():
        assert torch.equal(ours.state[parameter]["exp_avg"], usual.state[theirs[name]]["momentum_buffer"])
        assert torch.allclose(parameter, theirs[name], rtol=0, atol=1e-6), name


def test_all_else_is_adamws() -> None:
    mine, theirs = parameters(OTHERS | HIDDEN), parameters(OTHERS)
    ours, usual = Muon([group(mine)], **OPTIONS), AdamW([group(theirs)], **OPTIONS)
    for step in range(3):
        give_gradients(step, mine)
        for name, parameter in theirs.items():
            parameter.grad = mine[name].grad
        ours.step()
        usual.step()
    for name, parameter in theirs.items():
        assert torch.equal(mine[name], parameter), name
        assert ours.state[mine[name]].keys() == usual.state[parameter].keys()
    assert all("exp_avg_sq" not in ours.state[mine[name]] for name in HIDDEN)
    ours.zero_grad()
    assert all(parameter.grad is None for parameter in mine.values())


@given(rows=st.integers(1, 12), columns=st.integers(1, 12), seed=st.integers(0, 50))
def test_an_update_is_nearly_orthogonal_and_as_long_as_adamws(rows: int, columns: int, seed: int) -> None:
    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    found = orthogonal(matrix * 10.0 ** (seed % 7 - 3))
    values = torch.linalg.svdvals(found.double())
    given_values = torch.linalg.svdvals(matrix.double())
    kept = values[given_values > 0.05 * given_values[0]]
    assert bool(((kept > 0.3) & (kept < 1.3)).all())
    # Its directions are those of the matrix.
    assert float((found * matrix).sum()) > 0


def test_no_gradient_changes_nothing_and_an_empty_one_only_decays() -> None:
    named = parameters(HIDDEN)
    before: dict[str, Tensor] = {name: each.detach().clone() for name, each in named.items()}
    ours = Muon([group(named)], **OPTIONS)
    ours.step()
    assert all(torch.equal(named[name], before[name]) for name in named)
    named["0.wq"].grad = torch.zeros(7, 5)
    ours.step()
    assert torch.equal(named["0.wq"], before["0.wq"] * (1 - 0.02 * 0.1))
    assert torch.equal(named["0.w_down"], before["0.w_down"])
