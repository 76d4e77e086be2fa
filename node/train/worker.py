"""The worker process: sole owner of the device, and of the model.

``python -m node.train.worker FD``: answers the main process's calls strictly in order. Computing never blocks
the main process's event loop, and the loop never touches the device.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from node.data.stream import open_stream
from node.model.init import parameter_count, parameter_shapes
from node.net.ipc import Buffer, Reply, serve
from node.train.inner import Message, Trainer, open_device
from protocol.spec import RunSpec
from protocol.tensorpack import PayloadLayout
from protocol.types import DType, StageRange, TensorHeader

Body = Mapping[str, Any]
Blobs = Sequence[Buffer]


class Worker:
    """The calls of the main process, one method each; :class:`Trainer` does the work."""

    _trainer: Trainer

    def check(self, body: Body, _: Blobs) -> Reply:
        """Whether this machine can compute on `device`: asked before it joins a run."""
        open_device(body["device"])
        return Reply({})

    def build(self, body: Body, _: Blobs) -> Reply:
        """Create stages, optimizer and links; open the data if stage 0 is here. Answers facts by stage."""
        spec = RunSpec.from_json(body["spec"])
        stages = StageRange(*body["stages"])
        stream = open_stream(spec, body["source"], body["tokenizer"]) if 0 in stages else None
        self._trainer = Trainer(spec, stages, body["device"], stream)
        self._trainer.connect(body["k_upstream"], body["k_downstream"])
        outer = self._trainer.outer
        return Reply(
            {
                "digests": [outer[stage].digest() for stage in stages],
                "codecs": [outer[stage].layout.codec for stage in stages],
                "embedding_payload_bytes": PayloadLayout(parameter_shapes(spec, 0), spec.outer).nbytes,
                "payload_bytes": [outer[stage].layout.nbytes for stage in stages],
                "parameters": [parameter_count(spec, stage) for stage in stages],
            }
        )

    def begin_round(self, body: Body, _: Blobs) -> Reply:
        self._trainer.begin_round(body["round"], range(*body["samples"]))
        return Reply({})

    def forward(self, body: Body, blobs: Blobs) -> Reply:
        return _reply(self._trainer.forward(body["step"], body["microbatch"], _message(body, blobs)))

    def backward(self, body: Body, blobs: Blobs) -> Reply:
        return _reply(self._trainer.backward(body["microbatch"], _message(body, blobs)))

    def evaluate(self, body: Body, blobs: Blobs) -> Reply:
        return _reply(self._trainer.evaluate(body["microbatch"], _message(body, blobs)))

    def squared_norm(self, _: Body, __: Blobs) -> Reply:
        return Reply({"squares": self._trainer.squared_gradient_norm()})

    def apply(self, body: Body, _: Blobs) -> Reply:
        self._trainer.apply(body["step"], body["norm"])
        return Reply({})

    def end_inner_phase(self, _: Body, __: Blobs) -> Reply:
        return Reply(asdict(self._trainer.end_inner_phase()))

    def end_validation(self, _: Body, __: Blobs) -> Reply:
        return Reply({"loss": self._trainer.end_validation()})

    def propose(self, body: Body, _: Blobs) -> Reply:
        payload = self._trainer.propose(body["stage"])
        return Reply({"finite": payload is not None}, () if payload is None else (payload,))

    def screen(self, body: Body, blobs: Blobs) -> Reply:
        return Reply({"problems": self._trainer.screen(body["stage"], [bytes(blob) for blob in blobs])})

    def commit(self, body: Body, blobs: Blobs) -> Reply:
        payloads = [(bytes(blob), weight) for blob, weight in zip(blobs, body["weights"], strict=True)]
        digest = self._trainer.commit(body["stage"], payloads, body["mine_included"])
        embedding = self._trainer.embedding_digest() if body["stage"] == 0 else None
        return Reply({"digest": digest, "embedding_digest": embedding})

    def commit_embedding(self, body: Body, blobs: Blobs) -> Reply:
        payloads = [(bytes(blob), weight) for blob, weight in zip(blobs, body["weights"], strict=True)]
        return Reply({"embedding_digest": self._trainer.commit_embedding(payloads)})

    def abort(self, body: Body, _: Blobs) -> Reply:
        self._trainer.abort(body["stage"])
        return Reply({})

    def digest(self, body: Body, _: Blobs) -> Reply:
        return Reply({"digest": self._trainer.outer[body["stage"]].digest()})

    def write_checkpoint(self, body: Body, _: Blobs) -> Reply:
        self._trainer.write_checkpoint(Path(body["folder"]), body["round"])
        return Reply({})


def _message(body: Body, blobs: Blobs) -> Message | None:
    if not blobs:
        return None
    tensors = tuple(TensorHeader(name, DType(dtype), tuple(shape)) for name, dtype, shape in body["tensors"])
    return Message(tensors, bytes(blobs[0]))


def _reply(message: Message | None) -> Reply:
    if message is None:
        return Reply({"tensors": None})
    tensors = [(tensor.name, tensor.dtype.value, tensor.shape) for tensor in message.tensors]
    return Reply({"tensors": tensors}, (message.payload,))


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s worker: %(message)s")
    torch.set_num_threads(int(os.environ["HETNODE_THREADS"]))
    worker = Worker()
    methods = (
        "check build begin_round forward backward evaluate squared_norm apply end_inner_phase end_validation "
        "propose screen commit commit_embedding abort digest write_checkpoint"
    )
    serve(int(sys.argv[1]), {name: getattr(worker, name) for name in methods.split()})


if __name__ == "__main__":
    main()
