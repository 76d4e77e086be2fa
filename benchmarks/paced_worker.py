"""The production worker with a stopwatch, and with a pace where it shall stand for a device of its own.

``python -m benchmarks.paced_worker FD``. With the environment variable HETNODE_PACE (seconds) the passes of
one microbatch take so long together, a third of it forward, as if each member computed on hardware of its
own: what the real computing leaves of it is slept.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from node.ipc.channel import Buffer, Reply, serve
from node.worker.worker import Worker, handlers

PACE_VARIABLE = "HETNODE_PACE"
FORWARD_SHARE = 1 / 3

Body = Mapping[str, Any]
Blobs = Sequence[Buffer]


class PacedWorker(Worker):
    """The calls of the production worker; what forward and backward passes took is asked with `passes`."""

    def __init__(self, pace: float) -> None:
        self._pace = pace
        self._passes: list[tuple[str, float]] = []

    def forward(self, body: Body, blobs: Blobs) -> Reply:
        with self._timed("forward", self._pace * FORWARD_SHARE):
            return super().forward(body, blobs)

    def backward(self, body: Body, blobs: Blobs) -> Reply:
        with self._timed("backward", self._pace * (1 - FORWARD_SHARE)):
            return super().backward(body, blobs)

    def passes(self, _: Body, __: Blobs) -> Reply:
        """Kind and seconds of every pass since the last call."""
        passes, self._passes = self._passes, []
        return Reply({"passes": passes})

    @contextmanager
    def _timed(self, kind: str, pace: float) -> Iterator[None]:
        began = time.monotonic()
        yield
        time.sleep(max(0.0, began + pace - time.monotonic()))
        self._passes.append((kind, time.monotonic() - began))


def main() -> None:
    torch.set_num_threads(1)
    worker = PacedWorker(float(os.environ.get(PACE_VARIABLE, "0")))
    serve(int(sys.argv[1]), {**handlers(worker), "passes": worker.passes})


if __name__ == "__main__":
    main()
