"""Small payloads, and the same as vectors in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from protocol.math.payload_layout import TensorLayout
from protocol.math.topk import SparseTensor, sparsify
from protocol.spec.outer import OuterSpec

SHAPES = {"a": (40, 16), "b": (700,), "c": (3, 5)}
SPARSE: dict[str, Any] = {"chunk": 64, "top_k": 8}
CODECS: list[dict[str, Any]] = [SPARSE, SPARSE | {"quantizer": "none"}, {"top_k": 0}]


def payload(outer: OuterSpec, seed: int, shared: float = 1.0, scale: float = 1.0) -> dict[str, SparseTensor]:
    """Noise, plus `shared` times what all payloads have in common."""
    common, own = (torch.Generator().manual_seed(each) for each in (99, seed))
    found = {}
    for name, shape in SHAPES.items():
        values = shared * torch.randn(shape, generator=common) + torch.randn(shape, generator=own)
        found[name] = sparsify(scale * values, TensorLayout(shape, outer))
    return found


def flat(content: dict[str, SparseTensor]) -> Tensor:
    parts = []
    for name, shape in SHAPES.items():
        dense = torch.zeros(torch.Size(shape).numel(), dtype=torch.float64)
        content[name].add_to(dense, 1.0)
        parts.append(dense)
    return torch.cat(parts)


def cosine(a: Tensor, b: Tensor) -> float:
    return float(a.dot(b) / (a.norm() * b.norm()))
