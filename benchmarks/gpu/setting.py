"""Names and settings of the parts of ``make gpu``."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.tables import Table

if TYPE_CHECKING:
    from protocol.spec.run import RunSpec

PARTS = (
    "tests",
    "parity",
    "speed",
    "profile",
    "pipeline",
    "packing",
    "exchange",
    "optimizers",
    "host",
    "memory",
    "swarm",
)
"""The parts in their order."""

Figures = Mapping[str, Any]
Measured = tuple[Table, Figures]


def command_of(part: str) -> str:
    """The command that measures a part again."""
    return f"python -m benchmarks.gpu --only {part}"


@dataclass(frozen=True)
class Setting:
    """Where and how large a part measures.

    Attributes:
        device: of torch.
        toy: seconds on a CPU in place of minutes on a GPU.
        folder: for files of the part.
    """

    device: str
    toy: bool
    folder: Path

    @property
    def is_cuda(self) -> bool:
        """Whether the device is a CUDA one."""
        return self.device.startswith("cuda")

    def synchronize(self) -> None:
        """Wait until the device has done all that is queued."""
        if self.is_cuda:
            import torch  # noqa: PLC0415  only parts import torch, in processes of their own

            torch.cuda.synchronize(self.device)

    def seconds(self, work: Callable[[], object], repeats: int) -> float:
        """The median time of `work`, after one call that warms up."""
        taken = []
        for _ in range(1 + (1 if self.toy else repeats)):
            self.synchronize()
            start = time.perf_counter()
            work()
            self.synchronize()
            taken.append(time.perf_counter() - start)
        return median(taken[1:])

    def large(self, **overrides: Any) -> RunSpec:
        """Preset 1b as one full replica; nano where it is a toy."""
        from protocol.run_files.resolve import resolve  # noqa: PLC0415

        one = {"swarm.replicas": 1, "swarm.pipelines": 0, "inner.steps": 1000}
        return resolve("nano" if self.toy else "1b", overrides={**one, **overrides})
