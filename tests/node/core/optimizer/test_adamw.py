"""AdamW has the bits of torch.optim.AdamW in its fused form."""

from __future__ import annotations

import subprocess
import sys

import torch
from torch import nn

from node.core.optimizer.adamw import AdamW

OPTIONS = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-6}


def groups(seed: int) -> list[dict[str, object]]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"wq": (7, 5), "norm": (3,), "unused": (2,)}
    named = {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}
    return [
        {"params": [("wq", named["wq"])], "weight_decay": 0.1},
        {"params": [(name, named[name]) for name in ("norm", "unused")], "weight_decay": 0.0},
    ]


def test_steps_with_a_changing_rate_have_the_bits_of_torchs_class() -> None:
    ours, theirs = AdamW(groups(0), **OPTIONS), torch.optim.AdamW(groups(0), **OPTIONS, fused=True)
    generator = torch.Generator().manual_seed(1)
    for step in range(5):
        for mine, usual in zip(ours.param_groups, theirs.param_groups, strict=True):
            assert mine["param_names"] == usual["param_names"]
            mine["lr"] = usual["lr"] = 0.02 / (step + 1)
            for name, one, other in zip(mine["param_names"], mine["params"], usual["params"], strict=True):
                if name != "unused":
                    one.grad = other.grad = torch.randn(one.shape, generator=generator)
        ours.step()
        theirs.step()
    for mine, usual in zip(ours.param_groups, theirs.param_groups, strict=True):
        for one, other in zip(mine["params"], usual["params"], strict=True):
            assert torch.equal(one, other)
            assert ours.state.get(one, {}).keys() == theirs.state.get(other, {}).keys()
            assert all(torch.equal(ours.state[one][key], value) for key, value in theirs.state[other].items())


def test_a_step_imports_no_compiler() -> None:
    code = (
        "import sys, torch; from node.core.optimizer.adamw import AdamW\n"
        "p = torch.nn.Parameter(torch.ones(2))\n"
        "o = AdamW([{'params': [('p', p)], 'weight_decay': 0.1}], lr=0.1, betas=(0.9, 0.9), eps=1e-8)\n"
        "p.grad = torch.ones(2); o.step(); o.zero_grad(); assert p.grad is None\n"
        "print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
