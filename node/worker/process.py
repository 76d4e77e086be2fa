"""The worker process, put together: the calls of training, those about the machine, and those of leaves.

``python -m node.worker.process FD`` answers them.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from random import Random, SystemRandom

import torch

from node.agreement.likeness import LikenessMemory
from node.agreement.probe import AgreementProbe
from node.core.worker.worker import Worker
from node.ipc.channel import serve
from node.ipc.worker_calls import BeginRound, EndInnerPhase, InnerReport
from node.machine.machine import OwnMachine
from node.machine.memory import keep_freed_tensors
from node.snapshots.snapshot_calls import SnapshotCalls
from protocol.server.terminal import log_as
from protocol.wire.typed_calls import Handler, handlers


class NodeWorker(Worker):
    """A worker on the devices of this machine, which measures how far payloads agree.

    Args:
        random: draws the elements on which payloads are compared.
    """

    def __init__(self, random: Random | None = None) -> None:
        self.machine = OwnMachine()
        memory = LikenessMemory((random or SystemRandom()).randint)
        super().__init__(self.machine, partial(AgreementProbe, memory))

    def begin_round(self, call: BeginRound) -> None:
        super().begin_round(call)
        keep_freed_tensors(True)

    def end_inner_phase(self, call: EndInnerPhase) -> InnerReport:
        report = super().end_inner_phase(call)
        keep_freed_tensors(False)
        return report

    def handlers(self) -> dict[str, Handler]:
        """What answers each call."""
        return {**handlers(self.machine), **handlers(self), **handlers(SnapshotCalls(self))}


def main() -> None:
    log_as("worker")
    torch.set_num_threads(int(os.environ["HETNODE_THREADS"]))
    serve(int(sys.argv[1]), NodeWorker().handlers())


if __name__ == "__main__":
    main()
