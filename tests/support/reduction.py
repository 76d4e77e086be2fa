"""Payloads for reductions of a stage."""

from __future__ import annotations

import torch

from protocol.codec.payload import encode
from protocol.math.topk import sparsify
from protocol.reduction.parts import ReductionLayout


def payload_of(layout: ReductionLayout, seed: int) -> bytes:
    """A payload that is the same each time."""
    generator = torch.Generator().manual_seed(seed)
    tensors = layout.payload.tensors.items()
    content = {name: sparsify(torch.randn(each.shape, generator=generator), each) for name, each in tensors}
    return encode(layout.payload, content)


def payloads_of(layout: ReductionLayout, count: int) -> list[bytes]:
    """So many different payloads."""
    return [payload_of(layout, seed) for seed in range(count)]
