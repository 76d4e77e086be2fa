"""How a member computes: its device, compilation, checkpointing and precision.

Each node chooses these for itself; they are no part of the run specification. Only the last bits of local
results depend on the choice, as they do between two machines. The outer state does not depend on these bits.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache, partial
from textwrap import shorten

import psutil
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from node.core.model.llama import LlamaBlock
from node.core.model.stage import RunBlock
from node.ipc.worker_calls import Precision
from protocol.errors import ErrorCode, HetnodeError

_BF16_CAPABILITY = 8, 0
"""Of the first CUDA devices that compute in bf16."""
_BF16_AMD = re.compile(r"gfx(908|90a|9[45].|1[12]..)(:|$)")
"""Architectures of AMD, with features behind a colon, that do: CDNA, and RDNA from 3 on."""
_BF16_MACOS = 14, 0
BACKEND = "inductor"
"""Backend of torch.compile."""


@dataclass(frozen=True)
class Compute:
    """How the stages of a member are computed.

    Attributes:
        compile: run blocks through torch.compile. Needs a C++ compiler on a CPU and Triton on a GPU. The
            first steps take about a minute longer.
        activation_checkpointing: store only the input of each block, and compute the block again in the
            backward pass. Costs a third more computation and saves most of the activation memory. On one
            machine the gradients are equal in every bit.
        precision: of matrix products and their results. Parameters, moments and the outer state are always
            float32. AUTO is bf16 on a GPU that computes in it, and fp32 elsewhere.
        pieces: into which a microbatch is cut, at most one for each sample. With several, only the input of a
            microbatch is stored, and the backward pass computes one piece after the other again.
    """

    device: str = "cpu"
    compile: bool = False
    activation_checkpointing: bool = False
    precision: Precision = Precision.AUTO
    pieces: int = 1

    def open(self) -> torch.device:
        """The device, after a test that it works; with `compile` also the compiler is tested.

        Raises HetnodeError DEVICE_UNAVAILABLE.
        """
        try:
            device = torch.device(self.device)
            torch.empty(1, device=device)  # torch.device() itself accepts a device that does not exist
        except (RuntimeError, AssertionError) as error:
            raise device_unavailable(
                f"The device '{self.device}' cannot be used",
                error,
                "Use --device cpu, or check the driver and the installed torch build.",
            ) from None
        if self.compile:
            _try_compiler(device, BACKEND)
        return device

    def autocast(self) -> torch.autocast:
        """Context manager that applies :attr:`precision` to a forward pass."""
        device = torch.device(self.device)
        precision = chosen_precision(device, self.precision)
        return torch.autocast(device.type, torch.bfloat16, enabled=precision == Precision.BF16)

    @property
    def run_block(self) -> RunBlock:
        """The forward pass of one block, for :attr:`Stage.run_block`."""
        run = _compiled(BACKEND) if self.compile else LlamaBlock.__call__
        return partial(_checkpointed, run) if self.activation_checkpointing else run


def chosen_precision(device: torch.device, wanted: Precision) -> Precision:
    """`wanted`, or in place of AUTO bf16 where `device` computes in it, else fp32."""
    if wanted != Precision.AUTO:
        return wanted
    has_bf16 = False
    if device.type == "cuda":
        # torch would emulate it on older devices, slower than fp32; of AMD's it says that all have it.
        found = torch.cuda.get_device_properties(device)
        is_new = (found.major, found.minor) >= _BF16_CAPABILITY
        has_bf16 = bool(_BF16_AMD.match(found.gcnArchName)) if torch.version.hip else is_new
    elif device.type == "mps":
        has_bf16 = torch.backends.mps.is_macos_or_newer(*_BF16_MACOS)
    return Precision.BF16 if has_bf16 else Precision.FP32


def memory_in_use(device: torch.device) -> int:
    """Bytes of the device's memory that this process holds; of main memory if the device is a CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device)
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    return int(psutil.Process().memory_info().rss)


@cache
def _compiled(backend: str) -> RunBlock:
    # Blocks of equal shape share one graph. torch limits the number of graphs; further shapes run uncompiled.
    return torch.compile(LlamaBlock.forward, dynamic=False, backend=backend)


def _checkpointed(run: RunBlock, block: LlamaBlock, *inputs: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        # An evaluation has no backward pass that would need the block again.
        return run(block, *inputs)
    # A block has no randomness (no dropout), so the state of the random generator need not be saved.
    output: Tensor = checkpoint(run, block, *inputs, use_reentrant=False, preserve_rng_state=False)
    return output


@cache
def _try_compiler(device: torch.device, backend: str) -> None:
    try:
        torch.compile(torch.neg, backend=backend)(torch.zeros(8, device=device))
    except Exception as error:  # the exception type differs for each missing tool
        raise device_unavailable(
            f"torch.compile cannot be used on '{device}'",
            error,
            "Leave out --compile (where a matrix sets it: --no-compile), or install a C++ compiler "
            "(and Triton for a GPU).",
        ) from None


def device_unavailable(what: str, error: Exception, remedy: str) -> HetnodeError:
    """`what` happened because of `error`, of which the message holds the first sentence."""
    reason = next(iter(str(error).splitlines()), type(error).__name__)  # a MemoryError may have no message
    reason = shorten(reason.partition(". ")[0], 200, placeholder=" ...")
    return HetnodeError(ErrorCode.DEVICE_UNAVAILABLE, f"{what}: {reason.rstrip('.')}.", remedy)
