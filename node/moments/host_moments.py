"""Moments of the inner optimizer in main memory: a step takes them through the device, piece by piece.

A card then holds 8 bytes of a parameter, its weight and gradient, in place of 16. The device computes what
it computes with moments of its own, so all bits are the same. Copies of the next piece and of the last one
run while the device computes the present one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from node.core.model.shapes import is_of_layer
from node.core.optimizer.adamw import MOMENTS, AdamW, ParameterGroup
from node.core.optimizer.inner import OPTIMIZERS, MakeOptimizer
from node.core.optimizer.muon import Muon
from protocol.memory.needs import PIECE, SLOTS


class HostMoments(AdamW):
    """Has the interface of AdamW, and the moments in main memory, pinned where the device is a CUDA one.

    Parameters are whole on each rank: those that are sharded have their moments on their devices.

    Args:
        kind: the optimizer whose arithmetic this one has.
        piece: most elements that go through the device at once, of parameters whose elements change by
            themselves. Others go as a whole.

    Attributes:
        state: as of AdamW, with `step` on the parameter's device.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        kind: MakeOptimizer,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        piece: int = PIECE,
    ) -> None:
        super().__init__(groups, lr=lr, betas=betas, eps=eps)
        self._on_device, self._piece = kind([], lr=lr, betas=betas, eps=eps), piece

    def new_moment(self, parameter: Tensor) -> Tensor:
        """Zeros of the shape of `parameter` in main memory."""
        return torch.zeros(parameter.shape, dtype=parameter.dtype, pin_memory=parameter.device.type == "cuda")

    @torch.no_grad()
    def step(self) -> None:
        """Change all parameters that have a gradient. At the end all moments are in main memory."""
        pieces = [each for group in self.param_groups for each in self._pieces_of(group)]
        if not pieces:
            return
        lines = _Lines.to(pieces[0].values.device)
        slots = [_Slot.of(pieces) for _ in range(min(SLOTS, len(pieces)))]
        for slot, piece in zip(slots, pieces, strict=False):
            slot.fill(piece, lines)
        for index, piece in enumerate(pieces):
            slot = slots[index % len(slots)]
            lines.after(slot.filled)
            self._step_piece(piece, slot)
            slot.empty(piece, lines)
            if index + len(slots) < len(pieces):
                slot.fill(pieces[index + len(slots)], lines)
        lines.finish()

    def _pieces_of(self, group: ParameterGroup) -> Iterator[_Piece]:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            if (gradient := parameter.grad) is None:
                continue
            is_turned = isinstance(self._on_device, Muon) and is_of_layer(name, parameter.dim())
            moments = MOMENTS[:1] if is_turned else MOMENTS
            state, values = self.state_of(parameter, moments), parameter.detach()
            held = {moment: state[moment] for moment in moments}
            # Both sides of a cut are computed alike: its place is a multiple of what processors take at once.
            is_cut = not is_turned and values.is_contiguous() and gradient.is_contiguous()
            size = self._piece if is_cut else max(1, values.numel())
            taken, ends = state["step"].clone(), range(0, values.numel(), size)
            for start in ends:
                if len(ends) > 1:
                    cut = slice(start, start + size)
                    part = values.view(-1)[cut]
                    part.grad = gradient.view(-1)[cut]
                    of_part = {moment: each.view(-1)[cut] for moment, each in held.items()}
                else:
                    part, of_part = values, held
                    part.grad = gradient
                yield _Piece(group, name, part, of_part, taken, state["step"])

    def _step_piece(self, piece: _Piece, slot: _Slot) -> None:
        taken = piece.taken.clone()
        self._on_device.state[piece.values] = {"step": taken, **slot.views(piece)}
        group: Any = {**piece.group, "params": [piece.values], "param_names": [piece.name]}
        self._on_device.step_group(group)
        self._on_device.state.clear()
        piece.values.grad = None
        piece.step.copy_(taken)


@dataclass(frozen=True, eq=False)
class _Piece:
    """A part of a parameter with its gradient, on the device, and its moments in main memory.

    `taken` is how many steps the parameter had before this one, and `step` where the new number is kept.
    """

    group: ParameterGroup
    name: str
    values: Tensor
    moments: Mapping[str, Tensor]
    taken: Tensor
    step: Tensor


@dataclass(frozen=True)
class _Lines:
    """The streams of a CUDA device that copy to it and from it; elsewhere copies end when they return."""

    device: torch.device
    up: Any = None
    down: Any = None

    @classmethod
    def to(cls, device: torch.device) -> _Lines:
        if device.type != "cuda":
            return cls(device)
        stream: Any = torch.cuda.Stream
        lines = cls(device, stream(device), stream(device))
        for line in (lines.up, lines.down):
            line.wait_stream(torch.cuda.current_stream(device))  # the slots' memory may be in use till then
        return lines

    def after(self, event: Any) -> None:
        """Let the device compute only after `event`."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def computed(self) -> Any:
        """The event of all that the device was told to compute."""
        return None if self.down is None else torch.cuda.current_stream(self.device).record_event()

    def copy(self, line: Any, target: Tensor, source: Tensor, after: Any) -> Any:
        """Copy on `line` after the event `after`, if there is one. Returns the event of its end."""
        if line is None:
            target.copy_(source)
            return None
        if after is not None:
            line.wait_event(after)
        with torch.cuda.stream(line):
            target.copy_(source, non_blocking=True)
        return line.record_event()

    def finish(self) -> None:
        """Wait until all is copied: then main memory may be read, and the slots' memory used again."""
        if self.down is not None:
            self.down.synchronize()


class _Slot:
    """Memory on the device for the moments of one piece after another."""

    def __init__(self, buffers: Mapping[str, Tensor]) -> None:
        self._buffers = buffers
        self.filled: Any = None
        self._emptied: Any = None

    @classmethod
    def of(cls, pieces: Sequence[_Piece]) -> _Slot:
        """Large enough for each of the `pieces`, which have one dtype and device."""
        sizes: dict[str, int] = {}
        for piece in pieces:
            for moment in piece.moments:
                sizes[moment] = max(sizes.get(moment, 0), piece.values.numel())
            like = piece.values
        return cls(
            {
                moment: torch.empty(size, dtype=like.dtype, device=like.device)
                for moment, size in sizes.items()
            }
        )

    def views(self, piece: _Piece) -> dict[str, Tensor]:
        """The memory for the moments of `piece`, in its shape."""
        size, shape = piece.values.numel(), piece.values.shape
        return {moment: self._buffers[moment][:size].view(shape) for moment in piece.moments}

    def fill(self, piece: _Piece, lines: _Lines) -> None:
        for moment, there in self.views(piece).items():
            self.filled = lines.copy(lines.up, there, piece.moments[moment], self._emptied)

    def empty(self, piece: _Piece, lines: _Lines) -> None:
        computed = lines.computed()
        for moment, there in self.views(piece).items():
            self._emptied = lines.copy(lines.down, piece.moments[moment], there, computed)


HOST_OPTIMIZERS: Mapping[str, MakeOptimizer] = {
    name: partial(HostMoments, kind=kind) for name, kind in OPTIMIZERS.items()
}
"""In place of node.core.optimizer.inner.OPTIMIZERS."""
