"""How a member computes: its device, compilation, checkpointing and precision.

Each node chooses these for itself; they are no part of the run specification. Stages, links and payloads have
the same meaning for every choice. Only the last bits of local results differ, as between two machines. The
outer state does not depend on these bits.
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
"""Backend of torch.compile."""


@dataclass(frozen=True)
class Compute:
    """How the stages of a member are computed.

    Attributes:
        device: a torch device name.
        compile: run blocks through torch.compile. Needs a C++ compiler on a CPU and Triton on a GPU. The
            first steps take about a minute longer.
        activation_checkpointing: store only the input of each block in the forward pass, and compute the
            block again in the backward pass. Costs a third more computation and saves most of the activation
            memory. On one machine the gradients are equal in every bit.
        precision: of matrix products and their results. Parameters, moments and the outer state are always
            float32. "auto" is bf16 on a GPU and fp32 elsewhere.
    """

    device: str = "cpu"
    compile: bool = False
    activation_checkpointing: bool = False
    precision: Precision = "auto"

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Self:
        """From the fields in `body`, the call of another process of this node; absent fields get defaults."""
        return cls(**{each.name: body[each.name] for each in fields(cls) if each.name in body})

    def open(self) -> torch.device:
        """The device, after a test that it works; with `compile` also the compiler is tested.

        Raises HetnodeError DEVICE_UNAVAILABLE.
        """
        device = _open_device(self.device)
        if self.compile:
            _try_compiler(device, BACKEND)
        return device

    def autocast(self) -> torch.autocast:
        """Context manager that applies :attr:`precision` to a forward pass."""
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
    """The compiled forward pass. Blocks of equal shape share one graph, in all stages and replicas.

    torch limits the number of graphs: in a process with very many block shapes the last ones run uncompiled.
    """
    return torch.compile(Block.forward, dynamic=False, backend=backend)


def _checkpointed(run: RunBlock, block: Block, x_bld: Tensor, cos_le: Tensor, sin_le: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        # An evaluation has no backward pass that would need the block again.
        return run(block, x_bld, cos_le, sin_le)
    # A block has no randomness (no dropout), so the state of the random generator need not be saved.
    output_bld: Tensor = checkpoint(
        run, block, x_bld, cos_le, sin_le, use_reentrant=False, preserve_rng_state=False
    )
    return output_bld


def _open_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(1, device=device)  # torch.device() itself accepts a device that does not exist
    except (RuntimeError, AssertionError) as error:
        raise HetnodeError(
            ErrorCode.DEVICE_UNAVAILABLE,
            f"The device '{name}' cannot be used: {str(error).splitlines()[0].rstrip('.')}.",
            "Use --device cpu, or check the driver and the installed torch build.",
        ) from None
    return device


@cache
def _try_compiler(device: torch.device, backend: str) -> None:
    try:
        torch.compile(torch.neg, backend=backend)(torch.zeros(8, device=device))
    except Exception as error:  # the exception type differs for each missing tool
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise HetnodeError(
            ErrorCode.DEVICE_UNAVAILABLE,
            f"torch.compile cannot be used on '{device}': {reason.rstrip('.')}.",
            "Leave out --compile, or install a C++ compiler (and Triton for a GPU).",
        ) from None
