"""The production worker with measured passes, and with a pace that imitates a separate device.

``python -m benchmarks.paced_worker FD``. The passes of one microbatch take at least HETNODE_PACE seconds (an
environment variable), a third of it for the forward pass. The worker sleeps for the time that is left after
computing, as if each member had its own hardware.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from node.ipc.channel import serve
from node.ipc.worker_calls import Backward, Forward, Message
from node.worker.process import NodeWorker
from protocol.wire.typed_calls import Request

PACE_VARIABLE = "HETNODE_PACE"
FORWARD_SHARE = 1 / 3


@dataclass(frozen=True)
class Passes(Request[tuple[tuple[str, float], ...]]):
    """Answers kind and seconds of every pass since the last call."""


class PacedWorker(NodeWorker):
    """The calls of the production worker, and :class:`Passes`."""

    def __init__(self, pace: float) -> None:
        super().__init__()
        self._pace = pace
        self._passes: list[tuple[str, float]] = []

    def forward(self, call: Forward) -> Message | None:
        with self._timed("forward", self._pace * FORWARD_SHARE):
            return super().forward(call)

    def backward(self, call: Backward) -> Message | None:
        with self._timed("backward", self._pace * (1 - FORWARD_SHARE)):
            return super().backward(call)

    def passes(self, _: Passes) -> tuple[tuple[str, float], ...]:
        passes, self._passes = self._passes, []
        return tuple(passes)

    @contextmanager
    def _timed(self, kind: str, pace: float) -> Iterator[None]:
        began = time.monotonic()
        yield
        time.sleep(max(0.0, began + pace - time.monotonic()))
        self._passes.append((kind, time.monotonic() - began))


def main() -> None:
    torch.set_num_threads(1)
    serve(int(sys.argv[1]), PacedWorker(float(os.environ.get(PACE_VARIABLE, "0"))).handlers())


if __name__ == "__main__":
    main()
