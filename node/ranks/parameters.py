"""The live parameters of a stage as the outer round sees them: each rank reads and changes those it owns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from node.ranks.ownership import Ownership


@dataclass(frozen=True)
class OwnedParameters:
    """The live `parameters` of a stage by canonical name, whole on every rank or sharded.

    All ranks call every method together.
    """

    parameters: Mapping[str, Tensor]
    ownership: Ownership = Ownership()  # noqa: RUF009  frozen

    @torch.no_grad()
    def read(self) -> dict[str, Tensor]:
        """The parameters that this rank owns: the live ones, or copies on the CPU where they are sharded."""
        found = {}
        for name, parameter in self.parameters.items():
            whole = self._joined(name) if is_sharded(parameter) else parameter
            if whole is not None and self.ownership.is_mine(name):
                found[name] = whole
        return found

    @torch.no_grad()
    def write(self, owned: Mapping[str, Tensor]) -> None:
        """Every rank takes the owners' values; `owned` is what :meth:`read` has returned, changed or not."""
        group = self.ownership.group
        for name, parameter in self.parameters.items() if group.size > 1 else ():
            owner = self.ownership.owner_of(name)
            if is_sharded(parameter):
                self._cut(owned.get(name), parameter, owner)
            else:
                group.broadcast(parameter.data, owner)

    @torch.no_grad()
    def all_finite(self) -> bool:
        """Whether all values are finite. The same answer on all ranks."""
        finite = all(bool(local_part(each).isfinite().all()) for each in self.parameters.values())
        return not self.ownership.group.any(not finite)

    def _joined(self, name: str) -> Tensor | None:
        """On the owner the whole tensor."""
        parameter = self.parameters[name]
        rows, part = parameter.shape[0], local_part(parameter)
        padded = torch.zeros(self._rows(parameter), *parameter.shape[1:])
        padded[: len(part)].copy_(part)
        parts = self.ownership.group.collect(padded, self.ownership.owner_of(name))
        return None if parts is None else torch.cat(parts)[:rows].view(parameter.shape)

    def _cut(self, whole: Tensor | None, parameter: Tensor, source: int) -> None:
        """Give each rank its part of the tensor `whole` of rank `source`."""
        size, part = self._rows(parameter), local_part(parameter)
        parts = None
        if whole is not None:
            padded = torch.zeros(size * self.ownership.group.size, *parameter.shape[1:])
            padded[: len(whole)].copy_(whole)
            parts = torch.split(padded, size)
        mine = self.ownership.group.hand_out(parts, torch.empty(size, *parameter.shape[1:]), source)
        part.copy_(mine[: len(part)])

    def _rows(self, parameter: Tensor) -> int:
        """Rows of the largest part: FSDP cuts the first dimension into parts of this size."""
        return -(-parameter.shape[0] // self.ownership.group.size)


def is_sharded(tensor: Tensor) -> bool:
    """Whether each rank has only a part of the tensor."""
    # The type is not imported: that takes seconds, and most workers have no such tensor.
    return hasattr(tensor, "to_local")


def local_part(tensor: Tensor) -> Tensor:
    """The part of this rank: all of a tensor that is not sharded. It shares the tensor's memory."""
    part: Tensor = tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return part.detach()
