"""Which rank of a peer keeps the outer state of which tensor."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from node.ranks.group import RankGroup
from node.ranks.remote_tensors import SharedTensor, with_all
from protocol.codec.payload import join
from protocol.math.outer_step import anchor_digest
from protocol.math.payload_layout import PayloadLayout

Key = TypeVar("Key", bound=Hashable)


def owners(shapes: Mapping[Key, tuple[int, ...]], ranks: int) -> dict[Key, int]:
    """The rank that owns each tensor, so that all ranks have about equally many elements.

    The largest tensors come first, each to the rank that has least. All ranks compute the same from `shapes`.
    A tensor is never cut: the largest bounds how even the shares are.
    """
    loads, found = [0] * ranks, {}
    for key, shape in sorted(shapes.items(), key=lambda item: -math.prod(item[1])):
        rank = min(range(ranks), key=loads.__getitem__)
        found[key] = rank
        loads[rank] += math.prod(shape)
    return found


@dataclass(frozen=True)
class Ownership:
    """The ranks of a peer, and the one that owns each parameter of a stage. One process alone owns all."""

    group: RankGroup = RankGroup()  # noqa: RUF009  frozen
    owners: Mapping[str, int] = field(default_factory=dict)

    def owner_of(self, name: str) -> int:
        """The rank that owns a parameter, or its optimizer state, which has a name such as NAME/momentum."""
        return self.owners.get(name.partition("/")[0], 0)

    def is_mine(self, name: str) -> bool:
        """Whether this rank owns it."""
        return self.owner_of(name) == self.group.rank

    def join(self, layout: PayloadLayout, parts: Mapping[str, bytes]) -> bytes | None:
        """The payload of the encoded tensors of all ranks. None if a rank lacks some of its own."""
        own = [name for name in layout.shapes if self.is_mine(name)]
        if self.group.any(parts.keys() != {*own}):
            return None  # nothing is pending: a round never sees half a stage
        found = {}
        for rank, data in enumerate(self.group.exchange(b"".join(parts.values()))):
            start = 0
            for name, length in layout.lengths.items():
                if self.owner_of(name) == rank:
                    found[name] = data[start : start + length]
                    start += length
        return join(layout, (found[name] for name in layout.tensors))

    def digest(self, shapes: Mapping[str, tuple[int, ...]], held: Mapping[str, Tensor]) -> str:
        """Digest of the tensors of `shapes` of all ranks, of which this rank has `held`; "" but on rank 0."""
        return with_all(self.group, self.shared(shapes, held), anchor_digest) or ""

    def shared(
        self, shapes: Mapping[str, tuple[int, ...]], held: Mapping[str, Tensor]
    ) -> dict[str, SharedTensor]:
        """All tensors of `shapes` for rank 0 to read; `held` has those that this rank owns."""
        return {
            name: SharedTensor(shape, self.owner_of(name), partial(held.__getitem__, name))
            for name, shape in shapes.items()
        }

    def hand_out(
        self, given: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]
    ) -> dict[str, Tensor]:
        """Of the tensors of `shapes`, which rank 0 has in `given`, those that this rank owns.

        All ranks call this together.
        """
        owned = {}
        for name, shape in shapes.items():
            owner, group = self.owner_of(name), self.group
            tensor = given[name].detach().contiguous() if group.is_first else torch.empty(0)
            if group.rank == owner and not group.is_first:
                tensor = torch.empty(shape)
            group.send(tensor, 0, owner)
            if group.rank == owner:
                owned[name] = tensor
        return owned
