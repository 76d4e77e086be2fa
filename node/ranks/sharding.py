"""Shards the parameters of modules over the ranks of a peer: FSDP2, torch.distributed.fsdp.fully_shard."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from contextlib import suppress

import torch
from torch import Tensor, nn

from node.ranks.group import RankGroup
from node.ranks.parameters import is_sharded

_MMAP_THRESHOLD = -3  # of mallopt


def shard(module: nn.Module, blocks: Iterable[nn.Module], device: torch.device, group: RankGroup) -> None:
    """Shard the parameters of `module` in place: each rank keeps its rows of each, on `device`.

    A block's parameters are whole only while it computes. The gradients become means over the ranks, so that
    each rank scales its loss by their number. All ranks must run the module equally often.
    """
    # Imported here: it takes seconds, and most workers shard nothing.
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415

    _return_freed_memory()
    mesh = init_device_mesh(device.type, (group.size,))
    # Also the outermost parameters: a commit between two passes must reach the whole ones.
    for each in (*blocks, module):
        fully_shard(each, mesh=mesh, reshard_after_forward=True)


def _return_freed_memory() -> None:
    """Let glibc return tensors above a megabyte to the system when they are freed.

    By default it keeps them once a larger one was freed: whole tensors, which a rank holds for a moment only,
    would stay its memory.
    """
    with suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 20)


def rows_of(whole: Tensor, rank: int, ranks: int) -> Tensor:
    """The rows of a `whole` tensor that one of the `ranks` keeps where it is sharded."""
    size = -(-len(whole) // ranks)
    return whole[rank * size : (rank + 1) * size]


def part_like(parameter: Tensor, whole: Tensor) -> Tensor:
    """This rank's part of a `whole` tensor, as `parameter` is sharded."""
    if not is_sharded(parameter):
        return whole
    mesh = parameter.device_mesh  # type: ignore[attr-defined]
    return rows_of(whole, mesh.get_local_rank(), mesh.size())


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor. Where it is sharded, all ranks must call this together."""
    found: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return found
