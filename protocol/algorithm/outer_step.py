"""The arithmetic of a round: digests of the anchor, and the step from one anchor to the next.

Every replica applies the same payloads in the same order with the same operations, each rounded by itself on
the CPU, so equal anchors stay equal in every bit.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from protocol.algorithm.clipping import clipping_scales, payload_norm
from protocol.algorithm.digest import CHUNK_BYTES, digest_of, header_of
from protocol.algorithm.topk import SparseTensor
from protocol.errors import ErrorCode, HetnodeError


def tensor_digest(name: str, tensor: Tensor) -> str:
    """The digest of one float32 tensor by itself, as :func:`anchor_digest`."""
    return anchor_digest({name: tensor})


def anchor_digest(parameters: Mapping[str, Tensor]) -> str:
    """The digest (hex) of float32 tensors: that of protocol.algorithm.digest, whatever the order of `parameters`.

    Tensors are hashed one at a time; no more than one of them is copied, and only if it is not on the CPU.
    """
    hashes, current, room = [], hashlib.sha256(), CHUNK_BYTES
    for name in sorted(parameters):
        rest = tensor_bytes(name, parameters[name])
        while rest:
            piece, rest = rest[:room], rest[room:]
            current.update(piece)
            room -= len(piece)
            if not room:
                hashes.append(current.digest())
                current, room = hashlib.sha256(), CHUNK_BYTES
    if room < CHUNK_BYTES:
        hashes.append(current.digest())
    shapes = {name: tuple(tensor.shape) for name, tensor in parameters.items()}
    return digest_of(header_of(shapes), hashes)


def tensor_bytes(name: str, tensor: Tensor) -> memoryview:
    """The bytes of a float32 tensor, little-endian and row-major; a view of them where it lies so already.

    Raises ValueError for another dtype; `name` is for its message.
    """
    if tensor.dtype != torch.float32:
        raise ValueError(f"'{name}' is {tensor.dtype}; digests are of float32 tensors")
    array = tensor.detach().contiguous().numpy(force=True).astype("<f4", copy=False)
    return array.reshape(-1).view(np.uint8).data


def apply_update(
    anchor: Mapping[str, Tensor],
    payloads: Sequence[Mapping[str, SparseTensor]],
    weights: Sequence[float],
    learning_rate: float,
) -> dict[str, Tensor]:
    """The anchor after a round: anchor - eta * (sum_m w_m sent_m) / (sum_m w_m), algorithm eq 2.

    What is sent counts clipped to the bound of its round (protocol.algorithm.clipping.clipping_scales). Sums run in the
    order given: callers pass the canonical order, by owner. The division is by the weight of all
    contributors, never by the number that sent an element. Computed in the anchor's dtype.

    Args:
        payloads: all tensors of the stage, also where `anchor` holds fewer: the norm is that of the whole.

    Returns:
        New tensors; `anchor` is left as it was.

    Raises:
        ValueError: no contributor, or a weight that is not positive and finite.
        HetnodeError: PAYLOAD_CORRUPT where finite payloads overflow in the sum.
    """
    if not payloads or not all(math.isfinite(weight) and weight > 0 for weight in weights):
        raise ValueError(f"a round needs contributors with positive finite weights, not {list(weights)}")
    total_weight = math.fsum(weights)
    scales = clipping_scales([payload_norm(payload) for payload in payloads])
    factors = [weight * scale for weight, scale in zip(weights, scales, strict=True)]
    moved = {}
    for name, tensor in anchor.items():
        total = torch.zeros_like(tensor).view(-1)
        for payload, factor in zip(payloads, factors, strict=True):
            payload[name].add_to(total, factor)
        # Plain operations in sequence: a fused alpha= would round once where other machines round twice.
        moved[name] = tensor - total.div_(total_weight).mul_(learning_rate).view_as(tensor)
        if not torch.isfinite(moved[name]).all():
            raise HetnodeError(
                ErrorCode.PAYLOAD_CORRUPT,
                f"The payloads of a round would move '{name}' out of the finite numbers.",
                "Every replica refuses this round; a payload of such size should have been screened.",
            )
    return moved
