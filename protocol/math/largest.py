"""The search for the k largest values of every chunk, on any device.

Shapes: c chunks, n elements of a chunk, k of them chosen, g groups.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protocol.math.quantizers.quantizer import Floats


def top_k(chunks_cn: Tensor, k: int) -> tuple[NDArray[np.int64], Floats]:
    """The k values [c, k] of largest magnitude of every row, of equal ones the first, and their indices.

    Each row is cut into groups. No element below the k-th largest of the groups' maxima can be among the k
    largest. The others, the candidates, are few; the host decides between them. Rows with many candidates,
    such as rows of zeros, are decided on the device first.

    Args:
        chunks_cn: finite, float32 or float64, any device.

    Returns:
        Ascending indices [c, k], and values.
    """
    count, size = chunks_cn.shape
    magnitude_cn = chunks_cn.abs()
    # More groups leave fewer candidates, and cost more in the search for the bound.
    groups = min(4 * k, size)
    # The elements that fill no group only fail to raise the bound.
    maxima_cg = magnitude_cn[:, : size // groups * groups].view(count, -1, groups).amax(dim=1)
    bound_c1 = maxima_cg.topk(k, dim=1, sorted=False).values.amin(dim=1, keepdim=True)
    is_candidate_cn = _at_least(magnitude_cn, bound_c1)
    candidates = _flatnonzero(is_candidate_cn)
    lengths_c = np.bincount(candidates // size)
    if lengths_c.max() > 2 * groups:  # too many to copy
        crowded = torch.from_numpy(np.flatnonzero(lengths_c > 2 * groups)).to(chunks_cn.device)
        is_candidate_cn[crowded] = _is_chosen(magnitude_cn[crowded], k)
        candidates = _flatnonzero(is_candidate_cn)
    values = chunks_cn.reshape(-1)[torch.from_numpy(candidates).to(chunks_cn.device)].numpy(force=True)
    row = candidates // size
    is_chosen = _is_chosen_of(row, np.abs(values), k)
    indices = candidates[is_chosen] - row[is_chosen] * size
    return indices.reshape(count, k), values[is_chosen].reshape(count, k)


def _is_chosen(magnitude_cn: Tensor, k: int) -> Tensor:
    """Which elements [c, n] are the k largest of their row, of equal ones the first."""
    cut_c1 = magnitude_cn.topk(k, dim=1, sorted=False).values.amin(dim=1, keepdim=True)
    above_cn, at_cut_cn = magnitude_cn > cut_c1, magnitude_cn == cut_c1
    room_c1 = k - above_cn.sum(dim=1, keepdim=True)
    return above_cn | (at_cut_cn & (at_cut_cn.cumsum(dim=1, dtype=torch.int32) <= room_c1))


def _is_chosen_of(row: NDArray[np.int64], magnitude: Floats, k: int) -> NDArray[np.bool_]:
    """As :func:`_is_chosen`, for a list of elements: their rows, ascending, and their magnitudes."""
    lengths_c = np.bincount(row)
    count, width = len(lengths_c), int(lengths_c.max())
    # Rows become as wide as the longest; -1 is below every magnitude.
    padded = np.full(count * width, -1.0, magnitude.dtype)
    gaps_c = np.arange(count) * width - (lengths_c.cumsum() - lengths_c)
    padded[np.arange(len(row)) + gaps_c[row]] = magnitude
    cut = np.partition(padded.reshape(count, width), width - k, axis=1)[:, width - k][row]
    is_chosen: NDArray[np.bool_] = magnitude >= cut
    # Only ties at the cut can give more than k of a row: of these the first are taken.
    if np.count_nonzero(is_chosen) > count * k:
        tied = np.flatnonzero(magnitude == cut)
        room = k - np.bincount(row[magnitude > cut], minlength=count)[row[tied]]
        place = np.arange(len(tied)) - np.searchsorted(row[tied], row[tied])
        is_chosen[tied] = place < room
    return is_chosen


def _at_least(magnitude_cn: Tensor, bound_c1: Tensor) -> Tensor:
    """Where the magnitude reaches the bound. On the CPU numpy compares three times as fast as torch."""
    if magnitude_cn.device.type == "cpu":
        return torch.from_numpy(np.greater_equal(magnitude_cn.numpy(), bound_c1.numpy()))
    return magnitude_cn >= bound_c1


def _flatnonzero(mask: Tensor) -> NDArray[np.int64]:
    """Flat positions of what is set, on the host. On the CPU numpy needs a tenth of torch's time."""
    if mask.device.type == "cpu":
        return np.flatnonzero(mask.numpy())
    return mask.flatten().nonzero().squeeze(1).numpy(force=True)
