"""The worker process: sole owner of the device and of the model.

``python -m node.worker.worker FD`` answers the calls of the main process (:mod:`node.ipc.worker_calls`)
strictly in order. Computing never blocks the event loop of the main process, and that loop never touches
the device.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from node.checkpoint.initial import initial_from, require_initial
from node.data.stream import open_stream
from node.data.tokenizer import find_tokenizer
from node.ipc import worker_calls as calls
from node.ipc.channel import Handler, serve
from node.ipc.typed_calls import handler
from node.model.init import embedding_shapes, parameter_count, parameter_shapes
from node.worker.compute import Compute
from node.worker.factories import TrainerFactories
from node.worker.speed import free_memory, layer_speed
from node.worker.trainer import Trainer
from protocol.algorithm.digest import header_of, size_of
from protocol.algorithm.outer_optimizer import committed_shapes
from protocol.spec.run import RunSpec
from protocol.types import Part
from protocol.wire.payload_codec import PayloadLayout


class Worker:
    """The calls of the main process, one method each; :class:`Trainer` does the work.

    Attributes:
        trainer: exists after :meth:`build`.
    """

    trainer: Trainer

    def __init__(self) -> None:
        self._computed = 0.0  # seconds of computing since the round began

    def check_device(self, call: calls.CheckDevice) -> int:
        """Try the device before this node joins a run.

        Raises HetnodeError DEVICE_UNAVAILABLE.
        """
        return free_memory(_compute(call.compute))

    def measure_speed(self, call: calls.MeasureSpeed) -> float:
        """Measure how fast the device trains layers of the run."""
        return layer_speed(call.spec, call.device, call.seconds)

    def require_initial(self, call: calls.RequireInitial) -> None:
        """Check that the parameters from which the run starts are here, before others count on this node.

        Raises HetnodeError where they are not.
        """
        require_initial(call.spec, call.initial)

    def build(self, call: calls.Build) -> calls.StageInfo:
        """Create stages and optimizers; open the data if stage 0 is here. To be called once."""
        spec, stages, local = call.spec, call.stages, call.local
        stream = None
        if 0 in stages:
            tokenizer = local.tokenizer or find_tokenizer(spec.data, *local.search_paths)
            stream = open_stream(spec, local.source, tokenizer)
        factories = TrainerFactories(initial=initial_from(local.initial))
        self.trainer = Trainer(spec, stages, _compute(local.compute), stream, factories)
        layouts = {stage: self.trainer.outer[stage].layout for stage in stages}
        parts = {(stage, Part.STAGE): _part(spec, layout.shapes) for stage, layout in layouts.items()}
        if 0 not in stages:
            parts[0, Part.EMBEDDING] = _part(spec, embedding_shapes(spec))
        # Every member applies the payloads of stage 0, because they change the embedding.
        embedding = PayloadLayout(parameter_shapes(spec, 0), spec.outer)
        return calls.StageInfo(
            codecs={stage: layout.codec for stage, layout in layouts.items()},
            payload_bytes={0: embedding.nbytes, **{stage: each.nbytes for stage, each in layouts.items()}},
            parameters={stage: parameter_count(spec, stage) for stage in stages},
            parts=parts,
        )

    def connect(self, call: calls.Connect) -> None:
        """Set the links to both neighbours; called again for every plan that changes them."""
        self.trainer.connect(call.k_upstream, call.k_downstream)

    def begin_round(self, call: calls.BeginRound) -> None:
        self._computed = 0.0
        self.trainer.begin_round(call.round_number, call.samples)

    def assign_samples(self, call: calls.AssignSamples) -> None:
        """Use other samples from the next step on, after the plan has changed during an inner phase."""
        self.trainer.assign(call.samples)

    def abandon(self, _: calls.Abandon) -> None:
        """Drop the inner step or validation that a failure has interrupted."""
        self.trainer.abandon()

    def forward(self, call: calls.Forward) -> calls.Message | None:
        with self._computing():
            return self.trainer.forward(call.step, call.microbatch, call.received)

    def backward(self, call: calls.Backward) -> calls.Message | None:
        with self._computing():
            return self.trainer.backward(call.microbatch, call.received)

    def evaluate(self, call: calls.Evaluate) -> calls.Message | None:
        return self.trainer.evaluate(call.microbatch, call.received)

    def squared_norm(self, _: calls.SquaredNorm) -> float:
        with self._computing():
            return self.trainer.squared_gradient_norm()

    def apply(self, call: calls.Apply) -> None:
        with self._computing():
            self.trainer.apply(call.step, call.norm)

    def end_inner_phase(self, _: calls.EndInnerPhase) -> calls.InnerReport:
        return calls.InnerReport(self.trainer.end_inner_phase(), self._computed)

    def end_validation(self, _: calls.EndValidation) -> float:
        return self.trainer.end_validation()

    def propose(self, call: calls.Propose) -> bytes | None:
        return self.trainer.propose(call.stage)

    def screen(self, call: calls.Screen) -> tuple[str, ...]:
        return tuple(self.trainer.screen(call.stage, call.payloads))

    def keep_training(self, _: calls.KeepTraining) -> None:
        """Called before the first inner step that is trained while proposals are pending."""
        self.trainer.keep_training()

    def commit(self, call: calls.Commit) -> calls.CommitResult:
        """Never called between the first forward and the `apply` of an inner step.

        Raises HetnodeError PAYLOAD_CORRUPT; nothing has changed.
        """
        weighted = list(zip(call.payloads, call.weights, strict=True))
        digest = self.trainer.commit(call.stage, call.round_number, weighted, call.mine_included)
        return calls.CommitResult(digest, self.trainer.embedding_digest() if call.stage == 0 else None)

    def commit_embedding(self, call: calls.CommitEmbedding) -> str:
        """Called without payloads where the round of stage 0 was aborted. Raises as :meth:`commit`."""
        weighted = list(zip(call.payloads, call.weights, strict=True))
        return self.trainer.commit_embedding(call.round_number, weighted)

    def abort(self, call: calls.Abort) -> None:
        self.trainer.abort(call.stage, call.round_number)

    def digests(self, _: calls.Digests) -> Mapping[tuple[int, Part], tuple[int, str]]:
        trainer = self.trainer
        found = {
            (stage, Part.STAGE): (trainer.rounds[stage], trainer.outer[stage].digest())
            for stage in trainer.stages
        }
        found[0, Part.EMBEDDING] = (trainer.embedding_round, trainer.embedding_digest())
        return found

    def load_initial(self, _: calls.LoadInitial) -> None:
        """Go back to the parameters before round 1."""
        self.trainer.load_initial()

    def load_part(self, call: calls.LoadPart) -> str:
        return self.trainer.load_part(call.stage, call.part, call.round_number, call.file)

    def restore(self, call: calls.Restore) -> calls.RestoredCheckpoint | None:
        """Load the newest usable checkpoint below `folder`."""
        found = self.trainer.restore(call.folder)
        return (
            None if found is None else calls.RestoredCheckpoint(found.round_number, found.private is not None)
        )

    def reset_error(self, call: calls.ResetError) -> None:
        """Drop error feedback and local progress of a stage, which a committed payload holds already."""
        self.trainer.forget_error(call.stage)

    def write_checkpoint(self, call: calls.WriteCheckpoint) -> None:
        """Write anchors and private state to `folder`, its name ``round-NNNNNN``; the last two are kept."""
        self.trainer.write_checkpoint(call.folder, call.round_number)

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Count the seconds. Results leave a GPU, so that all but its last operation has ended by then."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._computed += time.perf_counter() - began


def handlers(worker: Worker) -> dict[str, Handler]:
    """The calls that the main process can make."""
    return {
        **handler(calls.CheckDevice, worker.check_device),
        **handler(calls.MeasureSpeed, worker.measure_speed),
        **handler(calls.RequireInitial, worker.require_initial),
        **handler(calls.Build, worker.build),
        **handler(calls.Connect, worker.connect),
        **handler(calls.BeginRound, worker.begin_round),
        **handler(calls.AssignSamples, worker.assign_samples),
        **handler(calls.Forward, worker.forward),
        **handler(calls.Backward, worker.backward),
        **handler(calls.SquaredNorm, worker.squared_norm),
        **handler(calls.Apply, worker.apply),
        **handler(calls.Abandon, worker.abandon),
        **handler(calls.EndInnerPhase, worker.end_inner_phase),
        **handler(calls.Evaluate, worker.evaluate),
        **handler(calls.EndValidation, worker.end_validation),
        **handler(calls.Propose, worker.propose),
        **handler(calls.Screen, worker.screen),
        **handler(calls.KeepTraining, worker.keep_training),
        **handler(calls.Commit, worker.commit),
        **handler(calls.CommitEmbedding, worker.commit_embedding),
        **handler(calls.Abort, worker.abort),
        **handler(calls.Digests, worker.digests),
        **handler(calls.LoadInitial, worker.load_initial),
        **handler(calls.LoadPart, worker.load_part),
        **handler(calls.Restore, worker.restore),
        **handler(calls.ResetError, worker.reset_error),
        **handler(calls.WriteCheckpoint, worker.write_checkpoint),
    }


def _compute(options: calls.ComputeOptions) -> Compute:
    return Compute(options.device, options.compile, options.activation_checkpointing)


def _part(spec: RunSpec, parameters: Mapping[str, tuple[int, ...]]) -> calls.PartInfo:
    shapes = committed_shapes(parameters, spec.outer)
    return calls.PartInfo(size_of(shapes), header_of(shapes))


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s worker: %(message)s")
    torch.set_num_threads(int(os.environ["HETNODE_THREADS"]))
    serve(int(sys.argv[1]), handlers(Worker()))


if __name__ == "__main__":
    main()
