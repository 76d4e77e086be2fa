"""The worker process: sole owner of the device, and of the model.

``python -m node.worker.worker FD``: answers the main process's calls strictly in order. Computing never blocks
the main process's event loop, and the loop never touches the device.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from node.checkpoint.initial import initial_from, require_initial
from node.data.stream import open_stream
from node.data.tokenizer import find_tokenizer
from node.ipc.channel import Buffer, Handler, Reply, serve
from node.model.init import embedding_shapes, parameter_count, parameter_shapes
from node.worker.compute import Compute
from node.worker.factories import TrainerFactories
from node.worker.hosted_stages import Message
from node.worker.speed import free_memory, layer_speed
from node.worker.trainer import Trainer
from protocol.algorithm.digest import header_of, size_of
from protocol.algorithm.outer_optimizer import committed_shapes
from protocol.spec.run import RunSpec
from protocol.types import DType, Part, StageRange, TensorHeader
from protocol.wire.payload_codec import PayloadLayout

Body = Mapping[str, Any]
Blobs = Sequence[Buffer]


class Worker:
    """The calls of the main process, one method each; :class:`Trainer` does the work."""

    _trainer: Trainer
    _computed = 0.0
    """Seconds of computing since the round began."""

    def check(self, body: Body, _: Blobs) -> Reply:
        """Whether this machine can compute as it is to: asked before it joins a run.

        Answers the bytes free on it, 0 where its memory is the machine's own.
        """
        return Reply({"memory_bytes": free_memory(Compute.of(body))})

    def speed(self, body: Body, _: Blobs) -> Reply:
        """Operations per second on `device` in training layers of the run, measured for so many seconds."""
        spec = RunSpec.from_json(body["spec"])
        return Reply({"flops": layer_speed(spec, body["device"], body["seconds"])})

    def require_initial(self, body: Body, _: Blobs) -> Reply:
        """Whether the parameters from which the run starts are here: asked before others count on it."""
        require_initial(RunSpec.from_json(body["spec"]), _given(body))
        return Reply({})

    def build(self, body: Body, _: Blobs) -> Reply:
        """Create stages and optimizers; open the data if stage 0 is here. To be called once.

        Answers facts by stage, and the parts of the anchor that this member holds: bytes and header as in
        protocol.algorithm.digest.
        """
        spec = RunSpec.from_json(body["spec"])
        stages = StageRange(*body["stages"])
        stream = None
        if 0 in stages:
            search_paths = map(Path, body.get("search_paths", ()))
            stream = open_stream(
                spec, body["source"], body["tokenizer"] or find_tokenizer(spec.data, *search_paths)
            )
        built_from = TrainerFactories(initial=initial_from(_given(body)))
        self._trainer = Trainer(spec, stages, Compute.of(body), stream, built_from)
        outer = self._trainer.outer
        parts = [_part(spec, stage, Part.STAGE, outer[stage].layout.shapes) for stage in stages]
        if 0 not in stages:
            parts.append(_part(spec, 0, Part.EMBEDDING, embedding_shapes(spec)))
        return Reply(
            {
                "digests": [outer[stage].digest() for stage in stages],
                "codecs": [outer[stage].layout.codec for stage in stages],
                "embedding_payload_bytes": PayloadLayout(parameter_shapes(spec, 0), spec.outer).nbytes,
                "payload_bytes": [outer[stage].layout.nbytes for stage in stages],
                "parameters": [parameter_count(spec, stage) for stage in stages],
                "parts": parts,
            }
        )

    def connect(self, body: Body, _: Blobs) -> Reply:
        """Set the links to both neighbours; again for every plan that changes them."""
        self._trainer.connect(body["k_upstream"], body["k_downstream"])
        return Reply({})

    def begin_round(self, body: Body, _: Blobs) -> Reply:
        self._computed = 0.0
        self._trainer.begin_round(body["round"], range(*body["samples"]))
        return Reply({})

    def assign(self, body: Body, _: Blobs) -> Reply:
        """Other samples from the next step on, after a change of the plan in the midst of an inner phase."""
        self._trainer.assign(range(*body["samples"]))
        return Reply({})

    def abandon(self, _: Body, __: Blobs) -> Reply:
        """Forget the inner step or validation that a failure has interrupted."""
        self._trainer.abandon()
        return Reply({})

    def forward(self, body: Body, blobs: Blobs) -> Reply:
        with self._computing():
            return _reply(self._trainer.forward(body["step"], body["microbatch"], _message(body, blobs)))

    def backward(self, body: Body, blobs: Blobs) -> Reply:
        with self._computing():
            return _reply(self._trainer.backward(body["microbatch"], _message(body, blobs)))

    def evaluate(self, body: Body, blobs: Blobs) -> Reply:
        return _reply(self._trainer.evaluate(body["microbatch"], _message(body, blobs)))

    def squared_norm(self, _: Body, __: Blobs) -> Reply:
        with self._computing():
            return Reply({"squares": self._trainer.squared_gradient_norm()})

    def apply(self, body: Body, _: Blobs) -> Reply:
        with self._computing():
            self._trainer.apply(body["step"], body["norm"])
        return Reply({})

    def end_inner_phase(self, _: Body, __: Blobs) -> Reply:
        return Reply({**asdict(self._trainer.end_inner_phase()), "compute_seconds": self._computed})

    def end_validation(self, _: Body, __: Blobs) -> Reply:
        return Reply({"loss": self._trainer.end_validation()})

    def propose(self, body: Body, _: Blobs) -> Reply:
        payload = self._trainer.propose(body["stage"])
        return Reply({"finite": payload is not None}, () if payload is None else (payload,))

    def screen(self, body: Body, blobs: Blobs) -> Reply:
        return Reply({"problems": self._trainer.screen(body["stage"], [bytes(blob) for blob in blobs])})

    def keep_training(self, _: Body, __: Blobs) -> Reply:
        """Before the first inner step that is trained while proposals are pending."""
        self._trainer.keep_training()
        return Reply({})

    def commit(self, body: Body, blobs: Blobs) -> Reply:
        """Never between the first forward and the `apply` of an inner step."""
        stage, round_number = body["stage"], body["round"]
        digest = self._trainer.commit(stage, round_number, _weighted(body, blobs), body["mine_included"])
        embedding = self._trainer.embedding_digest() if stage == 0 else None
        return Reply({"digest": digest, "embedding_digest": embedding})

    def commit_embedding(self, body: Body, blobs: Blobs) -> Reply:
        """Without payloads where the round of stage 0 was aborted."""
        digest = self._trainer.commit_embedding(body["round"], _weighted(body, blobs))
        return Reply({"embedding_digest": digest})

    def abort(self, body: Body, _: Blobs) -> Reply:
        self._trainer.abort(body["stage"], body["round"])
        return Reply({})

    def digests(self, _: Body, __: Blobs) -> Reply:
        """By stage, and of the embedding: the round that the anchor is after, and its digest."""
        trainer = self._trainer
        stages = {stage: [trainer.rounds[stage], outer.digest()] for stage, outer in trainer.outer.items()}
        embedding = [trainer.embedding_round, trainer.embedding_digest()]
        return Reply({"stages": stages, "embedding": embedding})

    def load_initial(self, _: Body, __: Blobs) -> Reply:
        self._trainer.load_initial()
        return Reply({})

    def load_part(self, body: Body, _: Blobs) -> Reply:
        part, file = Part(body["part"]), Path(body["file"])
        return Reply({"digest": self._trainer.load_part(body["stage"], part, body["round"], file)})

    def restore(self, body: Body, _: Blobs) -> Reply:
        found = self._trainer.restore(Path(body["folder"]))
        if found is None:
            return Reply({"restored": False, "round": 0, "private": False})
        return Reply({"restored": True, "round": found.round_number, "private": found.private is not None})

    def forget_error(self, body: Body, _: Blobs) -> Reply:
        self._trainer.forget_error(body["stage"])
        return Reply({})

    def write_checkpoint(self, body: Body, _: Blobs) -> Reply:
        """Anchors and this node's own state to `folder`, its name ``round-NNNNNN``; the last two are kept."""
        self._trainer.write_checkpoint(Path(body["folder"]), body["round"])
        return Reply({})

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Count the seconds. On a GPU all but the last operation is over when they are: results leave it."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._computed += time.perf_counter() - began


def _given(body: Body) -> Path | None:
    return Path(body["initial"]) if body.get("initial") else None


def _part(spec: RunSpec, stage: int, part: Part, parameters: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    shapes = committed_shapes(parameters, spec.outer)
    return {"stage": stage, "part": part.value, "nbytes": size_of(shapes), "header": header_of(shapes)}


def _weighted(body: Body, blobs: Blobs) -> list[tuple[bytes, float]]:
    return [(bytes(blob), weight) for blob, weight in zip(blobs, body["weights"], strict=True)]


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


def handlers(worker: Worker) -> dict[str, Handler]:
    """The calls that the main process may make."""
    return {name: getattr(worker, name) for name in vars(Worker) if not name.startswith("_")}


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s worker: %(message)s")
    torch.set_num_threads(int(os.environ["HETNODE_THREADS"]))
    serve(int(sys.argv[1]), handlers(Worker()))


if __name__ == "__main__":
    main()
