"""Payloads for reductions of a stage."""

from __future__ import annotations

import torch

from protocol.algorithm.topk import sparsify
from protocol.wire.payload_codec import encode
from protocol.wire.reduction import ReductionLayout


def payloads_of(layout: ReductionLayout, count: int) -> list[bytes]:
    """So many different payloads, the same ones each time."""
    found = []
    for seed in range(count):
        generator = torch.Generator().manual_seed(seed)
        tensors = layout.payload.tensors.items()
        content = {
            name: sparsify(torch.randn(each.shape, generator=generator), each) for name, each in tensors
        }
        found.append(encode(layout.payload, content))
    return found
