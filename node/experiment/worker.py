"""The process that computes one trial, driven by :mod:`node.experiment.runner` one round at a time.

It ends when the runner ends, by whatever signal (node.ipc.channel).
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from node.experiment.measurement import Measurement
from node.experiment.options import ComputeOptions
from node.experiment.trial import Mode, Planned, Trial
from node.experiment.variation import Variation
from node.ipc.channel import Buffer, Handler, Reply, serve
from protocol.spec.run import RunSpec

Body = Mapping[str, Any]
Blobs = Sequence[Buffer]


def request_of(planned: Planned, folder: Path, options: ComputeOptions) -> dict[str, Any]:
    """The body of `begin`."""
    return {
        "spec": planned.trial.spec.model_dump(mode="json"),
        "variation": planned.trial.variation.changes,
        "name": planned.name,
        "mode": planned.mode.value,
        "validate_every": planned.validate_every,
        "folder": str(folder),
        "options": options.model_dump(mode="json"),
    }


class Worker:
    """The handlers: `begin` once, `advance` until the trial is done, `result`."""

    def __init__(self) -> None:
        self._measurement: Measurement | None = None

    def begin(self, body: Body, _: Blobs) -> Reply:
        trial = Trial(
            RunSpec.from_json(json.dumps(body["spec"])), Variation.model_validate(body["variation"])
        )
        planned = Planned(trial, body["name"], Mode(body["mode"]), body["validate_every"])
        options = ComputeOptions.model_validate(body["options"])
        self._measurement = Measurement(planned, Path(body["folder"]), options)
        return Reply({"done": len(self._measurement.rounds)})

    def advance(self, _: Body, __: Blobs) -> Reply:
        assert self._measurement is not None
        return Reply(self._measurement.advance().model_dump(mode="json"))

    def result(self, _: Body, __: Blobs) -> Reply:
        assert self._measurement is not None
        return Reply(self._measurement.result().model_dump(mode="json"))

    def handlers(self) -> dict[str, Handler]:
        return {"begin": self.begin, "advance": self.advance, "result": self.result}


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s experiment: %(message)s")
    torch.set_num_threads(int(os.environ["HETNODE_THREADS"]))
    serve(int(sys.argv[1]), Worker().handlers())


if __name__ == "__main__":
    main()
