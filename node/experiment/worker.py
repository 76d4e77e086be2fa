"""The process that computes one trial: its calls, and the worker that answers them.

:mod:`node.experiment.runner` sends the calls. The process ends when the runner ends (node.ipc.channel).
"""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from node.experiment.results import Result
from node.experiment.resumable_trial import ResumableTrial, RoundRecord
from node.experiment.trial import Planned, TrialOptions
from node.ipc.channel import serve
from protocol.server.terminal import log_as
from protocol.wire.typed_calls import Request, handlers


@dataclass(frozen=True)
class Begin(Request[int]):
    """Open a trial, or continue it from `folder`. The answer is the number of finished rounds."""

    planned: Planned
    folder: Path
    options: TrialOptions


@dataclass(frozen=True)
class Advance(Request[RoundRecord]):
    """Train one round."""


@dataclass(frozen=True)
class Finish(Request[Result]):
    """Measure the final model, after the last round."""


class TrialWorker:
    """Answers one `Begin`, an `Advance` for each round that is left, and then `Finish`."""

    _measurement: ResumableTrial

    def begin(self, request: Begin) -> int:
        self._measurement = ResumableTrial(request.planned, request.folder, request.options)
        return len(self._measurement.rounds)

    def advance(self, _: Advance) -> RoundRecord:
        return self._measurement.advance()

    def finish(self, _: Finish) -> Result:
        return self._measurement.result()


def main() -> None:
    log_as("experiment", logging.WARNING)
    torch.set_num_threads(int(os.environ["HETNODE_THREADS"]))
    serve(int(sys.argv[1]), handlers(TrialWorker()))


if __name__ == "__main__":
    main()
