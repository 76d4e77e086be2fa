"""On the CPU a transfer is the plain one; tests/node/core/worker/test_cuda.py has what must hold on a GPU."""

from __future__ import annotations

import torch

from node.core.model.transfer import copy_into, to_device


def test_on_the_cpu_nothing_is_copied_but_into_the_target() -> None:
    source, target = torch.arange(6.0).view(2, 3), torch.nn.Parameter(torch.zeros(2, 3))
    assert to_device(source, torch.device("cpu")) is source
    copy_into(target, source)
    assert torch.equal(target, source)
