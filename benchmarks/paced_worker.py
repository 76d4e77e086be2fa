"""The production worker with a stopwatch, and with a pace where it shall stand for a device of its own.

``python -m benchmarks.paced_worker FD``. With the environment variable HETNODE_PACE (seconds) the passes of
one microbatch take so long together, a third of it forward, as if each member computed on hardware of its
own: what the real computing leaves of it is slept.
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
from node.ipc.typed_calls import Request, handler
from node.ipc.worker_calls import Backward, Forward, Message
from node.worker.worker import Worker, handlers

PACE_VARIABLE = "HETNODE_PACE"
FORWARD_SHARE = 1 / 3


@dataclass(frozen=True)
class Passes(Request[tuple[tuple[str, float], ...]]):
    """Answers kind and seconds of every pass since the last call."""


class PacedWorker(Worker):
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
    worker = PacedWorker(float(os.environ.get(PACE_VARIABLE, "0")))
    serve(int(sys.argv[1]), {**handlers(worker), **handler(Passes, worker.passes)})


if __name__ == "__main__":
    main()
