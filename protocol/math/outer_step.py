"""The arithmetic of a round: the digest of what is committed, and the step from one round to the next.

Every replica applies the same payloads in the same order with the same operations. Each operation is rounded
by itself on the CPU, so replicas that are equal in every bit stay equal.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from protocol.errors import ErrorCode, HetnodeError
from protocol.math.clipping import SentTensor, clipping_scales, payload_norm
from protocol.math.digest import CHUNK_BYTES, digest_of, header_of
from protocol.math.outer_optimizer import State, outer_optimizer, parameters_of, state_name
from protocol.math.payload_layout import BLOCK
from protocol.math.topk import folded_sum
from protocol.spec.outer import OuterSpec


def anchor_digest(parameters: Mapping[str, Tensor]) -> str:
    """The digest (hex) of float32 tensors (protocol.math.digest), given in any order.

    `parameters` are a stage's anchor and the state of the outer optimizer, if it has any. They are hashed one
    at a time; only a tensor that is not on the CPU is copied.
    """
    # Chunks run across the borders of tensors: a checkpoint is handed on in these chunks.
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
    """The bytes of a float32 tensor, little-endian and row-major, a view if possible.

    Raises ValueError, which names `name`, for another dtype.
    """
    if tensor.dtype != torch.float32:
        raise ValueError(f"'{name}' is {tensor.dtype}; digests are of float32 tensors")
    array = tensor.detach().contiguous().numpy(force=True).astype("<f4", copy=False)
    return array.reshape(-1).view(np.uint8).data


def factors_of(
    payloads: Sequence[Mapping[str, SentTensor]], weights: Sequence[float], clip: float
) -> list[float]:
    """What each payload of a manifest is multiplied with in the sum: its weight and its clipping scale."""
    scales = clipping_scales([payload_norm(payload) for payload in payloads], clip)
    return [weight * scale for weight, scale in zip(weights, scales, strict=True)]


def stretch_of(total: Tensor, squares: Sequence[float], factors: Sequence[float]) -> float:
    """The factor by which a radial merge lengthens the mean of a tensor: to the mean of the payloads' norms.

    The mean of M payloads of unlike directions is up to sqrt(M) times shorter than they are, so that its best
    outer learning rate depends on M. The factor is at most that of orthogonal payloads of these norms: where
    one cancels the others, what is left of them has no more say. (arXiv 2604.21428 has no such bound.)

    Args:
        total: sum_m factor_m sent_m, flat float32.
        squares: of the norm of this tensor in each payload, before `factors`.
    """
    norms = [factor * math.sqrt(each) for factor, each in zip(factors, squares, strict=True)]
    blocks = (total[at : at + BLOCK].numpy(force=True) for at in range(0, len(total), BLOCK))
    actual = math.fsum(folded_sum(np.square(block, dtype=np.float64)) for block in blocks)
    length = math.sqrt(max(actual, math.fsum(norm * norm for norm in norms)))
    return math.fsum(norms) / length if 0 < length < math.inf else 1.0


def apply_update(
    committed: Mapping[str, Tensor],
    payloads: Sequence[Mapping[str, SentTensor]],
    weights: Sequence[float],
    outer: OuterSpec,
    meter: Callable[[str, Tensor], None] | None = None,
) -> dict[str, Tensor]:
    """What is committed after a round: parameters and optimizer state, by name (algorithm eq 2).

    The outer optimizer moves the parameters along the pseudo-gradient (sum_m w_m sent_m) / (sum_m w_m), in
    the dtype of `committed`; a radial merge lengthens each tensor of it (:func:`stretch_of`). Each payload is
    clipped first (protocol.math.clipping.clipping_scales). Sums run in the order given: callers pass the
    canonical order, by owner. The division is by the weight of all contributors, also where only some of them
    sent an element.

    Args:
        committed: some or all parameters of a stage, each with its optimizer state (:func:`state_name`).
        payloads: all tensors of the stage, also where `committed` holds fewer: the norm is that of the whole.
        meter: called with the name of each parameter and its weighted sum, flat, which it must not change.

    Returns:
        New tensors; `committed` keeps its values.

    Raises:
        ValueError: no contributor, or a weight that is not positive and finite.
        HetnodeError: PAYLOAD_CORRUPT where finite payloads overflow in the sum or in the optimizer.
    """
    if not payloads or not all(math.isfinite(weight) and weight > 0 for weight in weights):
        raise ValueError(f"a round needs contributors with positive finite weights, not {list(weights)}")
    # fsum is exact: the order of the weights does not matter.
    total_weight, factors = math.fsum(weights), factors_of(payloads, weights, outer.clip)
    optimizer, moved = outer_optimizer(outer), dict[str, Tensor]()
    for name, parameter in parameters_of(committed).items():
        total = torch.zeros_like(parameter).view(-1)
        for payload, factor in zip(payloads, factors, strict=True):
            payload[name].add_to(total, factor)
        if meter is not None:
            meter(name, total)
        divisor = total_weight
        if outer.merge == "radial" and len(payloads) > 1:
            divisor /= stretch_of(total, [payload[name].squares for payload in payloads], factors)
        # Plain operations in sequence: a fused alpha= would round once where other machines round twice.
        gradient = total.div_(divisor).view_as(parameter)
        state: State = {slot: committed[state_name(name, slot)] for slot in outer.slots}
        moved[name], state = optimizer.step(parameter, gradient, state)
        moved |= {state_name(name, slot): tensor for slot, tensor in state.items()}
        if not all(tensor.isfinite().all() for tensor in (moved[name], *state.values())):
            raise HetnodeError(
                ErrorCode.PAYLOAD_CORRUPT,
                f"The payloads of a round would make '{name}' infinite or not a number.",
                "Every replica refuses this round. Payloads of such size should have been refused before.",
            )
    return moved
