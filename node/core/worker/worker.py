"""The worker: sole owner of the device and of the model, in its own process (:mod:`node.worker.process`).

It answers the calls of the main process (:mod:`node.ipc.worker_calls`) strictly in order. Computing never
blocks the event loop of the main process, and that loop never touches the device.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from node.checkpoint import snapshot_codec
from node.checkpoint.initial import initial_from, require_initial
from node.core.model.shapes import embedding_shapes, parameter_shapes, payload_layout
from node.core.optimizer.inner import MakeOptimizer
from node.core.optimizer.outcome import Outcome, agreed_results
from node.core.optimizer.outer_stage import CommitProbe
from node.core.worker.compute import Compute, memory_in_use
from node.core.worker.factories import TrainerFactories
from node.core.worker.trainer import Trainer
from node.data.stream import KeptStreams, open_stream
from node.data.tokenizer import find_tokenizer
from node.ipc import worker_calls as calls
from node.ipc.stored_payload import StoredPayload
from node.ranks.group import RankGroup
from protocol.errors import ErrorCode, HetnodeError
from protocol.math.digest import header_of, size_of
from protocol.math.outer_optimizer import committed_shapes
from protocol.math.payload_layout import PayloadLayout
from protocol.spec.run import RunSpec
from protocol.types import Part, StageRange


class Machine(Protocol):
    """Where a worker computes."""

    @property
    def group(self) -> RankGroup:
        """The ranks of this peer."""

    def place(
        self, spec: RunSpec, stages: StageRange, options: calls.ComputeOptions
    ) -> tuple[Compute, bool, Mapping[str, MakeOptimizer]]:
        """How to compute these stages, whether their parameters are sharded, and the optimizers.

        Raises HetnodeError BAD_OPTION, DEVICE_UNAVAILABLE.
        """


MakeProbe = Callable[[int, calls.Comparison, Sequence[StoredPayload], float, RankGroup], CommitProbe]
"""From a stage, what to measure, payloads without a weight, ``outer.clip`` and the ranks of this peer."""


class Worker:
    """The calls of the main process about training, one method each; :class:`Trainer` does the work."""

    trainer: Trainer  # exists after `build`

    def __init__(self, machine: Machine, make_probe: MakeProbe) -> None:
        self._machine, self._make_probe = machine, make_probe
        self._computed, self._kept = 0.0, KeptStreams()  # seconds of computing since the round began; data

    def require_initial(self, call: calls.RequireInitial) -> None:
        """Raise HetnodeError unless the parameters from which the run starts are here."""
        require_initial(call.spec, call.initial)

    def build(self, call: calls.Build) -> calls.StageInfo:
        """Create stages and optimizers; open the data if stage 0 is here. Again after a change of the run.

        Raises HetnodeError BAD_OPTION, DEVICE_UNAVAILABLE if the stages cannot fit in the memory that this
        node may use.
        """
        spec, stages, local, group = call.spec, call.stages, call.local, self._machine.group
        if hasattr(self, "trainer"):
            del self.trainer  # the memory holds one
            gc.collect()
        compute, is_sharded, optimizers = self._machine.place(spec, stages, local.compute)
        stream = None
        if 0 in stages:
            found = local.tokenizer or find_tokenizer(spec.data, *local.search_paths, is_own_run=False)
            stream = open_stream(spec, local.own_data, found, is_own_run=False, kept=self._kept)
        factories = TrainerFactories(initial_from(local.initial), optimizers=optimizers)
        self.trainer = Trainer(spec, stages, compute, stream, factories, group, is_sharded)
        parts = {(stage, Part.STAGE): _part(spec, parameter_shapes(spec, stage)) for stage in stages}
        if self.trainer.outer.follower is not None:
            parts[0, Part.EMBEDDING] = _part(spec, embedding_shapes(spec))
        # Every member applies the payloads of stage 0, because they change the embedding.
        applied = sorted({0, *stages})
        return calls.StageInfo(
            payloads=_payloads(spec, applied),
            capacities=_capacities(spec, applied),
            parameters={stage: spec.parameters_of(stage) for stage in stages},
            parts=parts,
            snapshot=_snapshot(spec),
        )

    def connect(self, call: calls.Connect) -> None:
        """Set the links to both neighbours; called again for every plan that changes them."""
        self.trainer.connect(call.k_upstream, call.k_downstream, call.replica)

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
            return self.trainer.forward(call.step, call.microbatch, call.received, call.round_number)

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
        memory = memory_in_use(self.trainer.device)
        return calls.InnerReport(self.trainer.end_inner_phase(), self._computed, memory)

    def end_validation(self, _: calls.EndValidation) -> float:
        return self.trainer.end_validation()

    def propose(self, call: calls.Propose) -> bytes | None:
        payload = self.trainer.outer.propose(call.stage, call.share)
        return payload if self._machine.group.is_first else None

    def screen(self, call: calls.Screen) -> tuple[str, ...]:
        if not self._machine.group.is_first:  # it changes nothing, so one rank is enough
            return ()
        return tuple(self.trainer.outer[call.stage].screen(call.payloads))

    def keep_training(self, _: calls.KeepTraining) -> None:
        """Called before the first inner step that is trained while proposals are pending."""
        self.trainer.outer.keep_training()

    def commit(self, call: calls.Commit) -> calls.CommitResult:
        """Never called between the first forward and the `apply` of an inner step.

        Raises HetnodeError PAYLOAD_CORRUPT, PAYLOAD_UNAVAILABLE; nothing has changed.
        """
        outer, stage = self.trainer.outer, call.stage
        outcome, is_mine = self._outcome(outer[stage].layout, stage, call, call.position)
        probe, clip = None, self.trainer.spec.outer.clip
        if call.comparison is not None:
            probe = self._make_probe(stage, call.comparison, call.uncounted, clip, self._machine.group)
        digest = self.trainer.commit(stage, call.round_number, outcome, is_mine, probe)
        norms = (outer[stage].progress_norm, outer[stage].error_norm) if is_mine else (0.0, 0.0)
        follows = stage == 0 and not self.trainer.spec.link.embedding_every
        embedding = outer.embedding_digest() if follows else None
        return calls.CommitResult(digest, embedding, () if probe is None else tuple(probe.results()), *norms)

    def commit_embedding(self, call: calls.CommitEmbedding) -> str:
        """Raises as :meth:`commit`."""
        outcome, _ = self._outcome(payload_layout(self.trainer.spec, 0), 0, call, None)
        return self.trainer.commit_embedding(call.round_number, outcome)

    def _outcome(
        self,
        layout: PayloadLayout,
        stage: int,
        call: calls.Commit | calls.CommitEmbedding,
        position: int | None,
    ) -> tuple[Outcome, bool]:
        """What a call commits, and whether the payload of this member is in it."""
        if len(call.weights) == len(call.payloads):
            return list(zip(call.payloads, call.weights, strict=True)), position is not None
        [result], results = call.payloads, agreed_results(self.trainer.spec)
        assert results is not None, "the coordinator commits payloads where members gather them"
        data = result.read(results.most_nbytes(self.trainer.spec, stage))
        return results.read(layout, data, position)

    def abort(self, call: calls.Abort) -> None:
        self.trainer.outer.abort(call.stage, call.round_number)

    def digests(self, _: calls.Digests) -> Mapping[tuple[int, Part], tuple[int, str]]:
        outer = self.trainer.outer
        found = {(stage, Part.STAGE): (outer.rounds[stage], each.digest()) for stage, each in outer.items()}
        if not self.trainer.spec.link.embedding_every:
            found[0, Part.EMBEDDING] = (outer.embedding_round, outer.embedding_digest())
        return found

    def load_initial(self, _: calls.LoadInitial) -> None:
        """Go back to the parameters before round 1."""
        self.trainer.load_initial()

    def load_initial_part(self, call: calls.LoadInitialPart) -> str:
        return self.trainer.load_initial_part(call.stage, call.part, call.round_number)

    def load_part(self, call: calls.LoadPart) -> str:
        return self.trainer.load_part(call.stage, call.part, call.round_number, call.file)

    def restore(self, call: calls.Restore) -> calls.RestoredCheckpoint | None:
        if (found := self.trainer.restore(call.folder)) is None:
            return None
        return calls.RestoredCheckpoint(found.round_number, found.private is not None)

    def reset_error(self, call: calls.ResetError) -> None:
        """Drop error feedback and local progress of a stage, which a committed payload holds already."""
        self.trainer.outer.forget_error(call.stage)

    def write_checkpoint(self, call: calls.WriteCheckpoint) -> None:
        """Write anchors and private state to `folder`, named ``round-NNNNNN``; the last two are kept."""
        self.trainer.write_checkpoint(call.folder, call.round_number)

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Count the seconds. Raises WORKER_DIED where memory is short.

        Results leave a GPU, so that all but its last operation has ended by then.
        """
        began = time.perf_counter()
        try:
            yield
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise HetnodeError(
                ErrorCode.WORKER_DIED,
                f"The worker has no memory left: {str(error)[:300]}.",
                "The node starts it again; from the second time on, it computes a microbatch in pieces.",
            ) from None
        finally:
            self._computed += time.perf_counter() - began


def _part(spec: RunSpec, parameters: Mapping[str, tuple[int, ...]]) -> calls.PartInfo:
    shapes = committed_shapes(parameters, spec.outer)
    return calls.PartInfo(size_of(shapes), header_of(shapes))


def _payloads(spec: RunSpec, stages: Iterable[int]) -> dict[int, calls.PayloadInfo]:
    layouts = ((stage, payload_layout(spec, stage)) for stage in stages)
    return {stage: calls.PayloadInfo(layout.codec, layout.nbytes) for stage, layout in layouts}


def _capacities(spec: RunSpec, stages: Iterable[int]) -> dict[int, int]:
    results = agreed_results(spec)
    return {
        stage: results.most_nbytes(spec, stage) if results else payload_layout(spec, stage).nbytes
        for stage in stages
    }


def _snapshot(spec: RunSpec) -> calls.PartInfo:
    shape = spec.model.vocabulary, spec.model.width
    return calls.PartInfo(snapshot_codec.nbytes_of(*shape), snapshot_codec.snapshot_header(*shape))
