"""The training of one member: its stages, inner optimizer and outer state.

Only the trainer owns the model of a node. It knows no processes and sockets: :mod:`node.core.worker.worker`
calls it, one operation at a time. An inner step of a member:

    for microbatch in range(microbatches):
        message = trainer.forward(step, microbatch, message)   # activations, from upstream to downstream
        message = trainer.backward(microbatch, message)        # gradients, from downstream to upstream
    squares = trainer.inner.squared_gradient_norm()            # summed over all members of the replica
    trainer.apply(step, norm)                                  # clip, one step of the inner optimizer

A round of a member:

    trainer.begin_round(round_number, samples)
    ...                                                        # H inner steps
    trainer.end_inner_phase()
    payload = trainer.outer.propose(stage)                     # pseudo-gradient plus error feedback
    trainer.commit(stage, round_number, payloads, True)        # or outer.abort, which changes nothing

The caller changes anchors (by a commit or by loading another one) only between inner steps.

One file because stages, optimizers, committed state and links must change together, in an order decided here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from node.checkpoint import node_checkpoint
from node.checkpoint.files import read_part
from node.checkpoint.node_checkpoint import Restored
from node.checkpoint.private_state import StageState, TableState
from node.checkpoint.rank_checkpoint import Key, handed_out, named, private_of, shared_state
from node.checkpoint.snapshot_codec import snapshot
from node.core.model.link_table import LINK_TABLE
from node.core.model.shapes import EMBEDDING, embedding_shapes, parameter_shapes
from node.core.optimizer.inner import InnerOptimizer, Moments
from node.core.optimizer.muon import project_outputs
from node.core.optimizer.outcome import Outcome
from node.core.optimizer.outer_stage import CommitProbe
from node.core.optimizer.outer_state import OuterState
from node.core.worker.compute import Compute
from node.core.worker.factories import TrainerFactories
from node.core.worker.hosted_stages import HostedStages
from node.core.worker.phase import InnerPhase
from node.data.microbatches import MicrobatchReader
from node.data.stream import SampleStream
from node.ipc.worker_calls import InnerResult, Message
from node.ranks.group import RankGroup
from node.ranks.remote_tensors import with_all
from node.ranks.sharding import shard
from protocol.errors import HetnodeError
from protocol.math.outer_optimizer import committed_shapes
from protocol.math.output_subspace import output_basis
from protocol.spec.run import RunSpec
from protocol.types import Part, StageRange


class Trainer:
    """Stages, optimizers and outer state of one member. It starts with the initial parameters of the run.

    Create it once, and call :meth:`connect` for every plan that changes its links.

    Args:
        stages: the stages hosted here.
        stream: the samples; only the member that hosts stage 0 needs them.
        group: the ranks of this peer, if it hosts all stages. Each trains a share of the microbatches. All
            ranks call the methods together, in the same order; digests and payloads are those of rank 0.
        is_sharded: whether the parameters are sharded over the ranks; else each rank has all of them.

    Attributes:
        hosted: the stages with their links.
        modules: the stages, on `device`.
        inner: the inner optimizer.
        outer: committed state, error feedback, and pending proposals. Always on the CPU, so that all machines
            compute the same bits.
        samples: reads the microbatches.
        phase: progress of the current inner phase.
    """

    def __init__(
        self,
        spec: RunSpec,
        stages: StageRange,
        compute: Compute = Compute(),  # noqa: B008  frozen
        stream: SampleStream | None = None,
        factories: TrainerFactories = TrainerFactories(),  # noqa: B008  frozen
        group: RankGroup = RankGroup(),  # noqa: B008  frozen
        is_sharded: bool = False,
    ) -> None:
        self.spec, self.stages, self._factories = spec, stages, factories
        self.group, self.is_sharded = group, is_sharded
        self.hosted = HostedStages(
            spec, stages, compute, factories, partial(shard, group=group) if is_sharded else None
        )
        self.modules, self.device = self.hosted.modules, self.hosted.device
        parameters = {stage: self.parameters(stage) for stage in stages}
        table = self.hosted.table_values
        trained = parameters if table is None else {**parameters, LINK_TABLE: table}
        self.inner = InnerOptimizer(spec, trained, [EMBEDDING, *(table or ())], factories.optimizers)
        embedding = None if 0 in stages else factories.initial(spec, 0)[EMBEDDING]
        if spec.link.embedding_every and embedding is not None:
            self.hosted.use_snapshot(snapshot(embedding))
            embedding = None
        self.outer = OuterState(spec, parameters, embedding, group)
        self.samples = MicrobatchReader(spec, stream, group.rank, group.size)
        self.phase = InnerPhase(1)
        self._validation: list[float] = []

    def parameters(self, stage: int) -> dict[str, nn.Parameter]:
        """The live parameters of a hosted stage by canonical name."""
        return self.modules[stage].canonical_parameters()

    def connect(self, k_upstream: int | None, k_downstream: int | None, replica: int = 0) -> None:
        """Create the links to both neighbours from their k. None: no neighbour. 0: an uncompressed link."""
        table_vd = self.outer.embedding if k_upstream is not None and self.outer.has_embedding else None
        self.hosted.connect(k_upstream, k_downstream, table_vd, replica)

    # The inner phase

    def begin_round(self, round_number: int, samples: range) -> None:
        """Start the inner phase of `round_number`.

        `samples` are the ordinals of this replica's samples in the round. Their number determines how many
        microbatches an inner step has.
        """
        self.abandon()
        self.assign(samples)
        self.inner.begin_round(round_number)
        self.outer.begin_round()
        self.phase = InnerPhase(round_number)

    def assign(self, samples: range) -> None:
        """Use these samples from the next step on, which reads at its own step number.

        Call it between two steps, after a change of plan.
        """
        self.samples.assign(samples)

    def abandon(self) -> None:
        """Drop an inner step and a validation that a failure has interrupted. Completed steps stay."""
        self.hosted.abandon()
        self.inner.zero_grad()
        self._validation.clear()

    def forward(
        self, step: int, microbatch: int, received: Message | None, round_number: int = 0
    ) -> Message | None:
        """Forward pass of one training microbatch. Returns the message for the next member, None at the last.

        `received` is the message of the member upstream. It is None on the member that hosts stage 0, which
        reads the samples. `round_number` is that of the frames; 0: of the inner phase. Raises HetnodeError
        FRAME_CORRUPT for a message that cannot be used.
        """
        last = self.samples.microbatches - 1
        if self._trains(microbatch, last):
            tokens = self.samples.training(step, microbatch) if received is None else None
            with self.group.guarded():
                place = round_number or self.phase.round_number, step, microbatch
                return self.hosted.forward(place, received, tokens, self._counts(microbatch))
        return None

    def backward(self, microbatch: int, received: Message | None) -> Message | None:
        """Backward pass of a microbatch. Returns the gradient for the member upstream, None at the first."""
        microbatches = self.samples.microbatches
        if self._trains(microbatch, microbatches - 1):
            # Gradients are summed over the ranks; where parameters are sharded, they are averaged.
            parts = microbatches / self.group.size if self.is_sharded else microbatches
            with self.group.guarded():
                return self.hosted.backward(
                    microbatch, received, parts if self._counts(microbatch) else math.inf
                )
        return None

    def _counts(self, microbatch: int) -> bool:
        """Whether this rank computes the loss and the gradients of a microbatch."""
        return microbatch % self.group.size == self.group.rank

    def _trains(self, microbatch: int, last: int) -> bool:
        """Whether this rank runs the model on a microbatch of 0..`last`.

        Where parameters are sharded, all ranks run the model equally often, because every pass needs the
        parts of all: ranks that get no microbatch at the end of a step repeat the last one without effect.
        """
        repeats = self.is_sharded and microbatch == last and self.group.rank > last % self.group.size
        return repeats or self._counts(microbatch)

    def squared_gradient_norm(self) -> float:
        """Sum of squares of all gradients of this member, on all ranks after this; NaN: skip the step."""
        is_sound = not self.group.any(not self.hosted.is_sound)
        self.phase.squares = self._squares() if is_sound else math.nan
        return self.phase.squares

    def _squares(self) -> float:
        if self.is_sharded:
            return self.group.totals([self.inner.squared_gradient_norm()])[0]
        if self.group.size > 1:
            parameters = [each for stage in self.stages for each in self.parameters(stage).values()]
            for parameter in parameters:
                if parameter.grad is None:  # this rank had no microbatch
                    parameter.grad = torch.zeros_like(parameter)
            self.group.sum_in_place(
                [parameter.grad for parameter in parameters if parameter.grad is not None]
            )
        return self.inner.squared_gradient_norm()

    def apply(self, step: int, norm: float) -> None:
        """End inner step `step` (0-based in its round): clip by the global `norm`, then step the optimizer.

        If the norm is not finite, the step is skipped. All members get the same norm, so all skip the same
        step. A step beyond the spec's H uses the learning rate of step H - 1; the result does not count it.
        """
        phase, steps = self.phase, self.spec.inner.steps
        is_regular = step < steps
        phase.norm = norm
        if math.isfinite(norm):
            # The schedule counts the steps of the run. The optimizer has counted fewer on a late joiner.
            number = (phase.round_number - 1) * steps + min(step, steps - 1)
            self.inner.step(number, norm)
            for stage in self.stages:
                project_outputs(self.parameters(stage), output_basis(self.spec, stage))
            phase.steps += is_regular
            phase.tokens += is_regular * self.samples.per_step * self.spec.model.context
        else:
            phase.skipped_steps += is_regular
            if is_regular and not math.isfinite(phase.squares):  # this member is the cause
                phase.nonfinite_step = phase.nonfinite_step or step + 1
        if is_regular:
            phase.losses += self.hosted.losses
        self.hosted.losses.clear()
        self.hosted.is_sound = True
        self.inner.zero_grad()

    def end_inner_phase(self) -> InnerResult:
        """The result of the inner phase. Only the last member knows the loss.

        A stage with non-finite parameters would skip every further step; it restarts from the anchor, without
        the moments, which may be what has made them so.
        """
        if self.phase.skipped_steps:
            for stage in self.outer.reset_nonfinite_stages():
                self.inner.reset(stage)
            if self.hosted.table is not None and not self.hosted.table.is_finite:
                self._reset_table()
        return self.phase.result(self.group)

    def evaluate(self, microbatch: int, received: Message | None) -> Message | None:
        """Forward pass of one validation microbatch, with the link compression of this replica."""
        if not self._trains(microbatch, self.spec.data.validation_batches - 1):
            return None
        tokens = self.samples.validation(microbatch) if received is None else None
        with self.group.guarded():
            result = self.hosted.evaluate(microbatch, received, tokens)
        if isinstance(result, Message):
            return result
        if self._counts(microbatch):
            self._validation.append(result)
        return None

    def end_validation(self) -> float:
        """Mean validation loss in nats per token since the last call. NaN except on the last member."""
        losses, self._validation = self._validation, []
        self.hosted.is_sound = True  # no step is in progress
        total, count = self.group.totals([math.fsum(losses), len(losses)])
        return total / count if count else math.nan

    # The outer round

    def commit(
        self,
        stage: int,
        round_number: int,
        outcome: Outcome,
        mine_included: bool,
        probe: CommitProbe | None = None,
    ) -> str:
        """As OuterState.commit. Refreshes T_perp after stage 0, which holds the embedding."""
        digest = self.outer.commit(stage, round_number, outcome, mine_included, probe)
        if stage == 0:
            self._refresh_link()
        return digest

    def commit_embedding(self, round_number: int, outcome: Outcome) -> str:
        """As OuterState.commit_embedding. Refreshes T_perp."""
        digest = self.outer.commit_embedding(round_number, outcome)
        if outcome:
            self._refresh_link()
        return digest

    def embedding_snapshot(self, round_number: int) -> Tensor | None:
        """TE after `round_number`, the last one of stage 0, as a snapshot carries it; on other ranks None.

        Every member makes that of round 0 itself, at any time.
        """
        if round_number == 0:
            initial_vd = self._factories.initial(self.spec, 0)[EMBEDDING]
            return snapshot(initial_vd) if self.group.is_first else None
        assert self.outer.rounds[0] == round_number, f"the embedding is after round {self.outer.rounds[0]}"
        shared = {EMBEDDING: self.outer.shared_committed(0)[EMBEDDING]}
        return with_all(self.group, shared, lambda tensors: snapshot(tensors[EMBEDDING]))

    # Start, recovery and checkpoints

    def load_initial(self) -> None:
        """Return to the state before round 1: initial parameters, no error feedback, no moments."""
        for stage in self.stages:
            self._load_stage(stage, 0, self._factories.initial(self.spec, stage))
        if self.outer.follower is not None:
            self.outer.load_embedding(0, self._factories.initial(self.spec, 0))
        self._refresh_link()

    def load_initial_part(self, stage: int, part: Part, round_number: int) -> str:
        """As :meth:`load_part`, from the initial parameters."""
        initial = self._factories.initial(self.spec, stage)
        return self._take_part(stage, part, round_number, initial)

    def load_part(self, stage: int, part: Part, round_number: int, file: Path) -> str:
        """Copy a part of the committed state after `round_number`. Returns its digest.

        Error feedback := 0, local := anchor, and the moments of the stage start from 0; so does the table of
        the link into it. `file` has the bytes of the part (protocol.math.digest), verified by the caller.

        Raises HetnodeError CHECKPOINT_CORRUPT: nothing has changed if the file is missing or has the wrong
        size; if it cannot be read to its end, the part is the initial one.
        """
        is_stage = part is Part.STAGE
        parameters = parameter_shapes(self.spec, stage) if is_stage else embedding_shapes(self.spec)
        shapes = committed_shapes(parameters, self.spec.outer)
        committed = self.group.agreed(lambda: read_part(file, shapes) if self.group.is_first else {})
        if self.group.size > 1:
            committed = self.outer[stage].ownership.hand_out(committed, shapes)
        try:
            return self._take_part(stage, part, round_number, committed)
        except HetnodeError:
            self.load_initial_part(stage, part, 0)  # a part of an anchor is none
            raise

    def _take_part(self, stage: int, part: Part, round_number: int, committed: Mapping[str, Tensor]) -> str:
        is_stage = part is Part.STAGE
        if is_stage:
            self._load_stage(stage, round_number, committed)
        else:
            self.outer.load_embedding(round_number, committed)
        self._refresh_link()
        return self.outer[stage].digest() if is_stage else self.outer.embedding_digest()

    def restore(self, folder: Path) -> Restored | None:
        """Continue from the newest usable checkpoint of this node below `folder`. None: nothing has changed.

        Stages that are not in it stay unchanged. If its private part is missing or damaged, error feedback
        and moments start from 0, as in :meth:`load_part`. Raises as :meth:`load_checkpoint`.
        """
        found = node_checkpoint.newest(folder, self.spec, self.stages) if self.group.is_first else None
        found = handed_out(self.group, self.spec, found, self.outer, self.is_sharded)
        if found is not None:
            self.load_checkpoint(found)
        return found

    def load_checkpoint(self, found: Restored) -> None:
        """As :meth:`restore`, from a checkpoint that is already verified. All tensors are copied.

        Raises HetnodeError CHECKPOINT_CORRUPT if it cannot be read to its end; then all is as before round 1.
        """
        try:
            for stage, committed in found.stages.items():
                self._load_stage(stage, found.round_number, committed)
                if found.private is not None:
                    self._load_private(stage, found.private[stage])
            if self.outer.follower is not None and found.embedding is not None:
                self.outer.load_embedding(found.round_number, found.embedding)
        except HetnodeError:
            self.load_initial()
            raise
        self._refresh_link()

    def write_checkpoint(self, folder: Path, round_number: int) -> None:
        """Write the committed and the private state after `round_number` to `folder`: node_checkpoint.write.

        Call it between rounds, or before an early end: local progress since the anchor is stored, pending
        proposals are not, and are dropped.

        Raises HetnodeError DISK_FULL; earlier checkpoints are unchanged.
        """
        outer = self.outer
        behind = [stage for stage, done in outer.rounds.items() if done != round_number]
        assert not behind, f"stages {behind} are not after round {round_number}"
        if outer.has_embedding:
            assert outer.embedding_round == round_number, f"the embedding is not after round {round_number}"
        outer.drop_proposals()
        embedding = None if outer.follower is None else outer.follower.committed
        moments = self.inner.state_dict()

        def write(tensors: Mapping[Key, Tensor]) -> None:
            committed = {stage: named(tensors, stage, "committed") for stage in outer}
            private = {stage: private_of(tensors, stage, moments[stage]) for stage in outer}
            private = self.with_table(private, moments)
            node_checkpoint.write(folder, self.spec, round_number, committed, embedding, private)

        with_all(self.group, shared_state(outer, moments), write)

    def own_tensors(self) -> list[object]:
        """The live tensors, nested by name, that only this member has between two inner steps."""
        parameters = {stage: self.parameters(stage) for stage in self.stages}
        return [parameters, self.hosted.table_values, self.inner.state_dict(), self.outer.own_tensors()]

    def with_table(
        self, private: Mapping[int, StageState], moments: Mapping[int, Moments | None]
    ) -> dict[int, StageState]:
        """`private` with the table of the link upstream, if there is one, as a part of the first stage."""
        if (table := self.hosted.table_values) is None:
            return dict(private)
        values, first = {name: value.detach().cpu() for name, value in table.items()}, self.stages.first
        return {**private, first: replace(private[first], table=TableState(values, moments[LINK_TABLE]))}

    def _load_stage(self, stage: int, round_number: int, committed: Mapping[str, Tensor]) -> None:
        self.abandon()  # its gradients belong to the old parameters
        self.outer.load_stage(stage, round_number, committed)
        self.inner.reset(stage)
        if stage == self.stages.first:
            self._reset_table()

    def _load_private(self, stage: int, private: StageState) -> None:
        # Anchor and optimizer state are loaded already; only the error feedback is replaced.
        self.outer[stage].load_error(private.error)
        # The file has only the parameters that differ from the anchor.
        self.outer.load_local(stage, private.local)
        self.inner.load_state_dict({stage: private.moments})
        # A table that was trained for a link into another stage is of no use here.
        if private.table is not None and stage == self.stages.first and self.hosted.table is not None:
            self.hosted.table.load(private.table.values)
            self.inner.load_state_dict({LINK_TABLE: private.table.moments})

    def _reset_table(self) -> None:
        if self.hosted.table is not None:
            self.hosted.table.reset()
            self.inner.reset(LINK_TABLE)

    def _refresh_link(self) -> None:
        if self.hosted.upstream is not None and self.outer.has_embedding:
            self.hosted.refresh_link(self.outer.embedding)
