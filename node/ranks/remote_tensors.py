"""Tensors that are elsewhere: those of all ranks, as rank 0 reads them, and those of files.

They are fetched one at a time, when they are used: whoever computes digests, or writes or loads a checkpoint,
needs memory for one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar, cast

import torch
from torch import Tensor

from node.ranks.group import RankGroup

Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result")
_END = -1


@dataclass(frozen=True)
class SharedTensor:
    """A float32 tensor that rank `owner` can give as a whole; `give` is not called elsewhere.

    With `owner` None all ranks call `give` together, and rank 0 uses what it returns.
    """

    shape: tuple[int, ...]
    owner: int | None
    give: Callable[[], Tensor]


@dataclass(frozen=True)
class RemoteTensor:
    """In place of a tensor that is written, hashed or copied: `detach` fetches it, as a tensor of its own."""

    shape: tuple[int, ...]
    detach: Callable[[], Tensor]
    dtype: torch.dtype = torch.float32

    @classmethod
    def read_by(cls, shape: tuple[int, ...], detach: Callable[[], Tensor]) -> Tensor:
        """A remote tensor, for those who use no more of a tensor than these three attributes."""
        return cast(Tensor, cls(shape, detach))


def with_all(
    group: RankGroup, tensors: Mapping[Key, SharedTensor], use: Callable[[Mapping[Key, Tensor]], Result]
) -> Result | None:
    """Call `use` on rank 0 with all `tensors`, which may be read there in any order. Returns its result.

    The other ranks give their tensors until `use` has ended, and return None. `tensors` has the same keys in
    the same order on all ranks. Raises what `use` raises, on rank 0 alone.
    """
    if group.size == 1:
        return use({key: shared.give() for key, shared in tensors.items()})
    listed = list(tensors.values())
    if not group.is_first:
        while (wanted := _told(group, _END)) != _END:
            _fetched(group, listed[wanted])
        return None

    def fetch(index: int) -> Tensor:
        _told(group, index)
        return _fetched(group, listed[index])

    def remote(index: int) -> Tensor:
        return RemoteTensor.read_by(listed[index].shape, lambda: fetch(index))

    try:
        return use({key: remote(index) for index, key in enumerate(tensors)})
    finally:
        _told(group, _END)


def _told(group: RankGroup, index: int) -> int:
    """The index that rank 0 tells."""
    return int(group.broadcast(torch.tensor([index]), 0))


def _fetched(group: RankGroup, shared: SharedTensor) -> Tensor:
    """On rank 0, the whole tensor."""
    if shared.owner is None:
        return shared.give()
    if group.rank == shared.owner:
        whole = shared.give().detach().to("cpu", torch.float32).contiguous()
    else:
        whole = torch.empty(shared.shape)
    return group.send(whole, shared.owner, 0)
