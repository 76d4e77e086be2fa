"""How a member computes: its device, and what it trades on it. A node's own choice, and no part of a run.

Whatever is chosen, stages, links and payloads mean the same. Only the last bits of what a member computes
differ, as they do from one machine to another; the outer state does not depend on them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache, partial
from typing import Any, Literal, Self

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from node.model.llama import Block
from node.model.stage import RunBlock
from protocol.errors import ErrorCode, HetnodeError

Precision = Literal["auto", "fp32", "bf16"]

BACKEND = "inductor"
"""Of torch.compile."""


@dataclass(frozen=True)
class Compute:
    """How the stages of a member are computed.

    Attributes:
        device: a torch device name.
        compile: run blocks as torch.compile makes them. Needs a C++ compiler on a CPU and Triton on a GPU;
            the first steps take a minute longer.
        activation_checkpointing: keep of each block's forward pass its input alone, and compute the block
            once more in the backward pass: a third more computing for a fraction of the memory. On one
            machine the gradients are equal in every bit.
        precision: of matrix products and what follows from them; parameters, moments and the outer state are
            float32 in any case. "auto" is bf16 on a GPU and fp32 elsewhere.
    """

    device: str = "cpu"
    compile: bool = False
    activation_checkpointing: bool = False
    precision: Precision = "auto"

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Self:
        """From those of its fields that are in the call of another process of this node."""
        return cls(**{each.name: body[each.name] for each in fields(cls) if each.name in body})

    def open(self) -> torch.device:
        """The device, tried out, and the compiler where one is asked for.

        Raises HetnodeError DEVICE_UNAVAILABLE.
        """
        device = _open_device(self.device)
        if self.compile:
            _try_compiler(device, BACKEND)
        return device

    def autocast(self) -> torch.autocast:
        """The precision, for a forward pass."""
        kind = torch.device(self.device).type
        is_half = self.precision == "bf16" or (self.precision == "auto" and kind == "cuda")
        return torch.autocast(kind, torch.bfloat16, enabled=is_half)

    @property
    def run_block(self) -> RunBlock:
        """The forward pass of one block, for :attr:`Stage.run_block`."""
        run = _compiled(BACKEND) if self.compile else Block.__call__
        return partial(_checkpointed, run) if self.activation_checkpointing else run


@cache
def _compiled(backend: str) -> RunBlock:
    """One graph for all blocks of one shape, whatever their stage, replica and parameters.

    A process that computes blocks of very many shapes ends up computing the last ones without a graph.
    """
    return torch.compile(Block.forward, dynamic=False, backend=backend)


def _checkpointed(run: RunBlock, block: Block, x_bld: Tensor, cos_le: Tensor, sin_le: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return run(block, x_bld, cos_le, sin_le)
    # Nothing in a block is random, so no state of a generator needs to be kept.
    output_bld: Tensor = checkpoint(
        run, block, x_bld, cos_le, sin_le, use_reentrant=False, preserve_rng_state=False
    )
    return output_bld


def _open_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise HetnodeError(
            ErrorCode.DEVICE_UNAVAILABLE,
            f"The device '{name}' cannot be used: {str(error).splitlines()[0].rstrip('.')}.",
            "Give --device cpu, or check the driver and the installed torch build.",
        ) from None
    return device


@cache
def _try_compiler(device: torch.device, backend: str) -> None:
    try:
        torch.compile(torch.neg, backend=backend)(torch.zeros(8, device=device))
    except Exception as error:  # torch has many names for what is missing
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise HetnodeError(
            ErrorCode.DEVICE_UNAVAILABLE,
            f"torch.compile cannot be used on '{device}': {reason.rstrip('.')}.",
            "Leave out --compile, or install a C++ compiler, and Triton for a GPU.",
        ) from None
