"""One member's share of the training: its stages, inner optimizer, ends of the links, and outer state.

This is the only owner of the model in a node. It runs in the worker process, knows nothing of processes or
sockets, and is driven by :mod:`node.worker.worker` one operation at a time. The caller guarantees that anchors
move (by a commit, or another one being loaded) between inner steps and never inside one.

Shapes: b micro-batch, L context, d width, k subspace width (d where the link is uncompressed).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from node.checkpoint import node_checkpoint
from node.checkpoint.node_checkpoint import Restored
from node.checkpoint.private_state import StageState
from node.data.stream import SampleStream
from node.model.init import (
    EMBEDDING,
    InitialParameters,
    embedding_shapes,
    initial_parameters,
    parameter_shapes,
)
from node.model.stage import Stage, next_token_loss
from node.optimizer.inner import AdamW, InnerOptimizer
from node.optimizer.outer_stage import EmbeddingFollower, OuterStage
from node.optimizer.schedule import learning_rate
from node.worker.compute import Compute
from protocol.algorithm.digest import size_of
from protocol.algorithm.outer_step import tensor_digest
from protocol.algorithm.subspace import (
    ReceivingEnd,
    SendingEnd,
    orthonormal_basis,
    receiving_end,
    sending_end,
)
from protocol.errors import ErrorCode, HetnodeError
from protocol.spec.run import RunSpec
from protocol.types import Part, StageRange, TensorHeader
from protocol.wire.activation_codec import pack_activation, pack_ids, unpack_activation, unpack_ids

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Message:
    """The tensors of one frame: what one member hands to the next."""

    tensors: tuple[TensorHeader, ...]
    payload: bytes


ReceivingEndFactory = Callable[[int, Tensor, Tensor], ReceivingEnd]
"""The receiving end of a link: its k (0: uncompressed), the basis [d, d], and TE [V, d] of the last commit."""


@dataclass(frozen=True)
class TrainerFactories:
    """What a trainer is built from: `initial` where the run starts from given parameters (node.checkpoint.initial), the
    rest where an experiment asks what another choice would do.
    """

    initial: InitialParameters = initial_parameters
    receiving_end: ReceivingEndFactory = receiving_end
    adamw: AdamW = torch.optim.AdamW


@dataclass
class _InFlight:
    """What a microbatch leaves behind between its forward and its backward pass."""

    tokens: Tensor
    received: Tensor | None
    output: Tensor


@dataclass(frozen=True)
class InnerResult:
    """What one inner phase did on this member so far.

    Attributes:
        loss: mean over all microbatches of completed steps; NaN except on the last member.
        steps: AdamW steps taken, without those beyond the spec's H. Equal on all members of a replica.
        tokens: of these steps.
        skipped_steps: completed steps whose gradients were not finite, which are no part of `steps`.
        gradient_norm: of the last completed step, before clipping.
    """

    loss: float
    tokens: int
    steps: int
    skipped_steps: int
    gradient_norm: float


@dataclass(frozen=True)
class Phase:
    """What an inner phase has come to so far, for one that goes on with it in another process.

    Attributes:
        losses: of all microbatches of completed steps, on the last member.
        norm: of the last completed step.
    """

    losses: tuple[float, ...]
    tokens: int
    steps: int
    skipped_steps: int
    norm: float


class Trainer:
    """Stages, optimizers and outer state of one member, with the initial parameters of the run.

    Create it once; connect it for every plan that gives it other links.

    Args:
        spec: the run.
        stages: the stages hosted here.
        compute: how the stages are computed. The outer state stays on the CPU, so that all machines get the
            same bits.
        stream: the samples; only the member that hosts stage 0 needs one.
        parts: others than those of a real swarm.
    """

    def __init__(
        self,
        spec: RunSpec,
        stages: StageRange,
        compute: Compute = Compute(),  # noqa: B008  frozen
        stream: SampleStream | None = None,
        parts: TrainerFactories = TrainerFactories(),
    ) -> None:
        self.spec, self.stages, self._parts = spec, stages, parts
        self._compute, self.device = compute, compute.open()
        self.outer = {}
        self.modules = {}
        for stage in stages:
            module = Stage(spec, stage, parts.initial(spec, stage))
            self.outer[stage] = OuterStage(spec, stage, module.canonical_parameters())
            module.run_block = compute.run_block
            self.modules[stage] = module.to(self.device)
        # A member downstream of stage 0 keeps the committed embedding too: both ends of a link derive
        # T_perp from it.
        self._follower = None if 0 in stages else EmbeddingFollower(spec, parts.initial(spec, 0)[EMBEDDING])
        self._optimizers = {
            stage: InnerOptimizer(
                spec, module.canonical_parameters(), undecayed={EMBEDDING}, adamw=parts.adamw
            )
            for stage, module in self.modules.items()
        }
        self._rounds = dict.fromkeys(stages, 0)
        self._embedding_round = 0
        self._stream = stream
        self._samples: range | None = None
        self._microbatches = spec.inner.microbatches
        self._upstream: ReceivingEnd | None = None
        self._downstream: SendingEnd | None = None
        self._basis_dd: Tensor | None = None
        self._in_flight: dict[int, _InFlight] = {}
        self._step_losses: list[Tensor] = []
        self._validation: list[float] = []
        self._reset_phase(1)
        self._validation_samples: np.ndarray | None = None

    @property
    def hosts_first(self) -> bool:
        return 0 in self.stages

    @property
    def hosts_last(self) -> bool:
        return self.spec.swarm.stages - 1 in self.stages

    @property
    def embedding(self) -> Tensor:
        """TE of the last committed round, [V, d] float32 on the CPU."""
        return self.outer[0].anchor[EMBEDDING] if self._follower is None else self._follower.table_vd

    @property
    def rounds(self) -> Mapping[int, int]:
        """Which round each hosted stage's anchor is after."""
        return self._rounds

    @property
    def embedding_round(self) -> int:
        """Which round :attr:`embedding` is after."""
        return self._rounds[0] if self._follower is None else self._embedding_round

    def connect(
        self,
        k_upstream: int | None,
        k_downstream: int | None,
        basis_upstream: Tensor | None = None,
        basis_downstream: Tensor | None = None,
    ) -> None:
        """Set the links to both neighbours; None where there is none, 0 where activations go uncompressed.

        The bases are orthonormal, [d, d]; that of the run where none is given.
        """

        self._upstream = self._downstream = None
        if k_upstream is not None:
            basis_dd = self._basis_on_device(basis_upstream)
            self._upstream = self._parts.receiving_end(k_upstream, basis_dd, self.embedding)
        if k_downstream is not None:
            self._downstream = sending_end(k_downstream, self._basis_on_device(basis_downstream))

    def begin_round(self, round_number: int, samples: range) -> None:
        """Start the inner phase of `round_`.

        `samples` are the ordinals of this replica's samples in it; their number says how many microbatches an
        inner step has.
        """
        self.abandon()
        self.assign(samples)
        for optimizer in self._optimizers.values():
            optimizer.begin_round(round_number)
        self._reset_phase(round_number)

    def assign(self, samples: range) -> None:
        """Go on with other `samples`, between two steps: the plan has changed since the inner phase began.

        The next step takes its place in them as if those before had been trained on them, too.
        """
        microbatches, rest = divmod(len(samples), self.spec.samples_per_round(1))
        assert microbatches, "no samples"
        assert not rest, "the plan and the spec disagree"
        self._samples, self._microbatches = samples, microbatches

    def abandon(self) -> None:
        """Forget the inner step, and the validation, that a failure has interrupted: neither counts at all.

        Completed steps stay. Harmless where nothing was under way.
        """
        self._in_flight.clear()
        self._step_losses.clear()
        self._validation.clear()
        for optimizer in self._optimizers.values():
            optimizer.forget_gradients()

    def forward(self, step: int, microbatch: int, received: Message | None) -> Message | None:
        """Forward pass of one training microbatch; returns what the next member needs, or None at the last.

        `received` is the former member's message; None on the member that hosts stage 0, which draws the
        samples itself. Raises HetnodeError FRAME_CORRUPT for a message that cannot be used.
        """
        tokens, x, leaf = self._enter(received, lambda: self._training_tokens(step, microbatch))
        with self._compute.autocast():
            output = self._run_stages(x)
            if self.hosts_last:
                output = next_token_loss(output.float(), tokens[:, 1:])
        if self.hosts_last:
            self._step_losses.append(output.detach())
        self._in_flight[microbatch] = _InFlight(tokens, leaf, output)
        return None if self.hosts_last else self._forward_message(output.detach(), tokens)

    def backward(self, microbatch: int, received: Message | None) -> Message | None:
        """Backward pass of a microbatch; returns the gradient for the former member, or None at the first."""
        work = self._in_flight.pop(microbatch)
        if received is None:
            (work.output / self._microbatches).backward()
        else:
            assert self._downstream is not None, "a gradient arrived at the last member"
            shape = self._wire_shape(self._downstream)
            wire = unpack_activation(
                received.tensors, received.payload, "gradient", shape, self.spec.link.dtype
            )
            work.output.backward(self._downstream.expand_backward(wire.to(self.device)).to(work.output.dtype))
        if work.received is None:
            return None
        assert self._upstream is not None
        assert work.received.grad is not None
        gradient = self._upstream.compress_backward(work.received.grad)
        return Message(*pack_activation("gradient", gradient, self.spec.link.dtype))

    def squared_gradient_norm(self) -> float:
        """Sum of squares of this member's gradients, for the clipping by the replica's global norm."""
        return math.fsum(
            float(parameter.grad.double().square().sum())
            for parameter in self._parameters()
            if parameter.grad is not None
        )

    def apply(self, step: int, norm: float) -> None:
        """End inner step `step` (0-based in its round): clip by the global `norm`, one AdamW step.

        A norm that is not finite skips the step on every member alike, since all get the same norm. A step
        beyond the spec's H has the learning rate of the last one within, and is no part of the result.
        """
        self._norm = norm
        is_regular = step < self.spec.inner.steps
        if math.isfinite(norm):
            scale = min(1.0, self.spec.inner.clip_norm / (norm + 1e-6))
            for parameter in self._parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)
            steps = self.spec.inner.steps
            now = (self._round - 1) * steps + min(step, steps - 1)
            rate = learning_rate(self.spec.inner, now, self.spec.total_steps)
            for optimizer in self._optimizers.values():
                optimizer.step(rate)
            self._steps += is_regular
            self._tokens += is_regular * self._samples_per_step * self.spec.model.context
        else:
            self._skipped += is_regular
        if is_regular:
            self._losses += self._step_losses
        self._step_losses = []
        for optimizer in self._optimizers.values():
            optimizer.forget_gradients()

    def end_inner_phase(self) -> InnerResult:
        """What the inner phase did. Only the last member knows the loss.

        A stage whose parameters are no longer finite, so that every step is skipped, starts again from the
        anchor.
        """
        if self._skipped:
            self._restart_stages_that_left_the_finite_numbers()
        loss = float(torch.stack(self._losses).double().mean()) if self._losses else math.nan
        return InnerResult(loss, self._tokens, self._steps, self._skipped, self._norm)

    def evaluate(self, microbatch: int, received: Message | None) -> Message | None:
        """Forward pass of one validation microbatch, in this replica's own forward mode."""
        tokens, x, _ = self._enter(received, lambda: self._validation_tokens(microbatch))
        with torch.inference_mode(), self._compute.autocast():
            output = self._run_stages(x)
            if self.hosts_last:
                self._validation.append(float(next_token_loss(output.float(), tokens[:, 1:])))
                return None
        with torch.inference_mode():
            return self._forward_message(output, tokens)

    def end_validation(self) -> float:
        """Mean validation loss in nats per token since the last call; NaN except on the last member."""
        losses, self._validation = self._validation, []
        return math.fsum(losses) / len(losses) if losses else math.nan

    def propose(self, stage: int) -> bytes | None:
        """This replica's payload for `stage`, pending until commit or abort.

        None where training has left the finite numbers: this replica then starts again from the anchor and
        contributes nothing to this round.
        """
        payload = self.outer[stage].propose(self._local(stage))
        if payload is None:
            self.outer[stage].reset(self._local(stage))
        elif self._goes_on:
            self.outer[stage].remember(self._local(stage))
        return payload

    def screen(self, stage: int, payloads: Sequence[bytes]) -> list[str]:
        """Why each of the payloads gathered for a round of `stage` must not count, or "" where it may."""
        return self.outer[stage].screen(payloads)

    def keep_training(self) -> None:
        """Inner steps go on before proposals of this round are decided: commits keep what they learn.

        What was learned before a proposal is in it, whether that is pending now or made later.
        """
        self._goes_on = True
        for stage, outer in self.outer.items():
            outer.remember(self._local(stage))

    def commit(
        self, stage: int, round_number: int, payloads: Sequence[tuple[bytes, float]], mine_included: bool
    ) -> str:
        """Apply the (payload, weight) pairs committed in `round_`, in order. Returns the new anchor's digest.

        Raises HetnodeError PAYLOAD_CORRUPT; nothing has changed.
        """
        assert round_number == self._rounds[stage] + 1, f"stage {stage} is after round {self._rounds[stage]}"
        self.outer[stage].commit(payloads, mine_included, self._local(stage))
        self._rounds[stage] = round_number
        if stage == 0:
            self._refresh_link()
        return self.outer[stage].digest()

    def commit_embedding(self, round_number: int, payloads: Sequence[tuple[bytes, float]]) -> str:
        """Apply stage 0's committed update to the embedding kept here; none where the round was aborted.

        Returns the digest of the table.
        """
        assert self._follower is not None, "the host of stage 0 commits the whole stage"
        assert round_number == self._embedding_round + 1, (
            f"the embedding is after round {self._embedding_round}"
        )
        if payloads:
            self._follower.commit(payloads)
            self._refresh_link()
        self._embedding_round = round_number
        return self.embedding_digest()

    def abort(self, stage: int, round_number: int) -> None:
        """The round is aborted: anchor, error feedback and local parameters stay; the inner phase goes on."""
        assert round_number == self._rounds[stage] + 1, f"stage {stage} is after round {self._rounds[stage]}"
        self.outer[stage].abort()
        self._rounds[stage] = round_number

    def embedding_digest(self) -> str:
        """Digest of TE of the last committed round: equal on all members of all replicas."""
        return tensor_digest(EMBEDDING, self.embedding)

    def forget_error(self, stage: int) -> None:
        """A payload of this peer's was committed after what was restored here: give up what it has covered.

        Error feedback := 0 and local := anchor; the moments stay.
        """
        self.outer[stage].reset(self._local(stage))

    def load_initial(self) -> None:
        """Back to the parameters before round 1: nothing learned, no moments."""
        for stage in self.stages:
            self._load_stage(stage, 0, self._parts.initial(self.spec, stage))
        if self._follower is not None:
            self._follower.load(self._parts.initial(self.spec, 0)[EMBEDDING])
            self._embedding_round = 0
        self._refresh_link()

    def load_part(self, stage: int, part: Part, round_number: int, file: Path) -> str:
        """Take over a part of the anchor after `round_`. Returns its digest.

        Error feedback := 0, local := anchor, and the stage's moments start anew.

        Args:
            file: the part's bytes (protocol.algorithm.digest), verified by the caller.

        Raises:
            HetnodeError: CHECKPOINT_CORRUPT where their number is wrong or they cannot be read.
        """
        if part is Part.STAGE:
            self._load_stage(stage, round_number, _read_part(file, parameter_shapes(self.spec, stage)))
            digest = self.outer[stage].digest()
        else:
            assert self._follower is not None, "the host of stage 0 loads the whole stage"
            self._follower.load(_read_part(file, embedding_shapes(self.spec))[EMBEDDING])
            self._embedding_round = round_number
            digest = self.embedding_digest()
        self._refresh_link()
        return digest

    def restore(self, folder: Path) -> Restored | None:
        """Go on from the newest usable checkpoint of this node's below `folder`; None changes nothing.

        Stages that it has not stay as they are. Without its private part this is as :meth:`load_part`.
        """
        found = node_checkpoint.newest(folder, self.spec, self.stages)
        if found is not None:
            self.go_on_from(found)
        return found

    def go_on_from(self, found: Restored) -> None:
        """As :meth:`restore`, from what has been read and verified. Nothing of it is kept: all is copied."""
        for stage, anchor in found.stages.items():
            self._load_stage(stage, found.round_number, anchor)
            if found.private is not None:
                self._resume(stage, found.private[stage])
        if self._follower is not None and found.embedding is not None:
            self._follower.load(found.embedding)
            self._embedding_round = found.round_number
        self._refresh_link()

    def write_checkpoint(self, folder: Path, round_number: int) -> None:
        """Write anchors and private state after `round_` to `folder`, as :func:`node_checkpoint.write`.

        Call it between rounds: what local has learned since the anchor is kept, pending proposals are not.

        Raises:
            HetnodeError: DISK_FULL; what was written before is untouched.
        """
        behind = [stage for stage, done in self._rounds.items() if done != round_number]
        assert not behind, f"stages {behind} are not after round {round_number}"
        assert self.embedding_round == round_number, f"the embedding is not after round {round_number}"
        node_checkpoint.write(
            folder,
            self.spec,
            round_number,
            {stage: outer.anchor for stage, outer in self.outer.items()},
            None if self._follower is None else self._follower.table_vd,
            self.private_state,
        )

    @property
    def private_state(self) -> dict[int, StageState]:
        """What a checkpoint keeps beside the anchors, by stage; not copied where it lies on the CPU."""
        return {stage: self._private_state(stage) for stage in self.stages}

    @property
    def phase(self) -> Phase:
        """The inner phase so far, between two steps."""
        losses = tuple(float(loss) for loss in self._losses)
        return Phase(losses, self._tokens, self._steps, self._skipped, self._norm)

    def resume_phase(self, phase: Phase) -> None:
        """After :meth:`begin_round`: as if the steps of `phase` had been taken here."""
        self._losses = [torch.tensor(loss, device=self.device) for loss in phase.losses]
        self._tokens, self._steps, self._skipped = phase.tokens, phase.steps, phase.skipped_steps
        self._norm = phase.norm

    def share_anchors(self, anchors: dict[int, dict[str, Tensor]]) -> None:
        """Hold one copy with other members of this process whose anchors are equal in every bit.

        Args:
            anchors: by stage, those that are held already; those that are only here are added. Stage 0 is
                among them, or here.
        """
        for stage, outer in self.outer.items():
            outer.anchor = anchors.setdefault(stage, outer.anchor)
        if self._follower is not None:
            self._follower.table_vd = anchors[0][EMBEDDING]

    def map_tensors(self, change: Callable[[str, Tensor], Tensor]) -> None:
        """Put `change(key, tensor)` in the place of every large tensor that no other member has as well.

        For one who keeps them elsewhere between two inner phases, while nothing is computed here: parameters,
        moments, error feedback, a pending proposal, and the tables of links. Keys are equal at every call
        until anything is done here.
        """
        self.abandon()
        for stage in self.stages:

            def of_stage(key: str, tensor: Tensor, stage: int = stage) -> Tensor:
                return change(f"{stage}/{key}", tensor)

            for name, parameter in self._local(stage).items():
                parameter.data = of_stage(f"local/{name}", parameter.data)
            self._optimizers[stage].map_tensors(of_stage)
            self.outer[stage].map_tensors(of_stage)
        for end, link in (("upstream", self._upstream), ("downstream", self._downstream)):
            held = {} if link is None else vars(link)
            for name, value in held.items():
                if isinstance(value, Tensor):
                    held[name] = change(f"{self.stages.first}/{end}/{name}", value)

    def _load_stage(self, stage: int, round_number: int, parameters: Mapping[str, Tensor]) -> None:
        self.abandon()
        self.outer[stage].load(parameters, self._local(stage))
        self._optimizers[stage].start_anew()
        self._rounds[stage] = round_number

    @torch.no_grad()
    def _resume(self, stage: int, state: StageState) -> None:
        local, outer = self._local(stage), self.outer[stage]
        for name, error in state.error.items():
            outer.error[name].copy_(error)
        for name, learned in state.local.items():
            local[name].copy_(learned)
        self._optimizers[stage].restore(state.moments)

    def _private_state(self, stage: int) -> StageState:
        outer = self.outer[stage]
        local = {name: parameter.detach().cpu() for name, parameter in self._local(stage).items()}
        moved = {name: value for name, value in local.items() if not torch.equal(value, outer.anchor[name])}
        return StageState(outer.error, moved, self._optimizers[stage].moments)

    def _reset_phase(self, round_number: int) -> None:
        self._round = round_number
        self._losses: list[Tensor] = []
        self._norm = math.nan
        self._steps = 0
        self._tokens = 0
        self._skipped = 0
        self._goes_on = False

    def _restart_stages_that_left_the_finite_numbers(self) -> None:
        for stage, outer in self.outer.items():
            local = self._local(stage)
            if not all(parameter.isfinite().all() for parameter in local.values()):
                log.warning("stage %d diverged to non-finite values: restarted from the anchor", stage)
                outer.reset(local)

    def _local(self, stage: int) -> Mapping[str, Tensor]:
        return self.modules[stage].canonical_parameters()

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for module in self.modules.values() for parameter in module.parameters()]

    def _run_stages(self, x: Tensor) -> Tensor:
        for module in self.modules.values():
            x = module(x)
        return x

    def _enter(self, received: Message | None, draw) -> tuple[Tensor, Tensor, Tensor | None]:  # type: ignore[no-untyped-def]
        """Tokens [b, L + 1], the input of the first hosted stage, and the leaf that collects its gradient."""
        if received is None:
            tokens = torch.from_numpy(draw()).long().to(self.device)
            return tokens, tokens[:, :-1], None
        assert self._upstream is not None, "a message arrived at the first member"
        inner, model = self.spec.inner, self.spec.model
        tokens = unpack_ids(
            received.tensors,
            received.payload,
            "tokens",
            (inner.microbatch_size, model.context + 1),
            model.vocabulary,
        ).to(self.device)
        shape = self._wire_shape(self._upstream)
        wire = unpack_activation(
            received.tensors, received.payload, "activation", shape, self.spec.link.dtype
        )
        x_bld = self._upstream.expand_forward(wire.to(self.device), tokens[:, :-1])
        leaf = x_bld.detach().requires_grad_()
        return tokens, leaf, leaf

    def _forward_message(self, output: Tensor, tokens: Tensor) -> Message:
        assert self._downstream is not None, "only the last member has no link downstream"
        compressed = self._downstream.compress_forward(output.float())
        activation, activation_bytes = pack_activation("activation", compressed, self.spec.link.dtype)
        ids, ids_bytes = pack_ids("tokens", tokens, self.spec.model.vocabulary)
        return Message((*activation, *ids), activation_bytes + ids_bytes)

    def _wire_shape(self, link: SendingEnd | ReceivingEnd) -> tuple[int, int, int]:
        model = self.spec.model
        return self.spec.inner.microbatch_size, model.context, link.k or model.width

    @property
    def _samples_per_step(self) -> int:
        return self._microbatches * self.spec.inner.microbatch_size

    def _training_tokens(self, step: int, microbatch: int) -> np.ndarray:
        assert self._stream is not None
        assert self._samples is not None
        size = self.spec.inner.microbatch_size
        # A step beyond H reads the round's samples again: all others belong to other replicas or rounds.
        first = step % self.spec.inner.steps * self._samples_per_step + microbatch * size
        return self._stream.read(self._samples[first : first + size])

    def _validation_tokens(self, microbatch: int) -> np.ndarray:
        assert self._stream is not None
        size = self.spec.inner.microbatch_size
        if (
            self._validation_samples is None
        ):  # the same ones all run long; a streamed source starts anew for them
            self._validation_samples = self._stream.validation(self.spec.data.validation_batches * size)
        return self._validation_samples[microbatch * size : (microbatch + 1) * size]

    def _basis_on_device(self, basis_dd: Tensor | None) -> Tensor:
        """`basis_dd`, or the run's where it is None."""
        if basis_dd is not None:
            return basis_dd.to(self.device)
        if self._basis_dd is None:
            self._basis_dd = orthonormal_basis(self.spec.model.width, self.spec.seed).to(self.device)
        return self._basis_dd

    def _refresh_link(self) -> None:
        if self._upstream is not None:
            self._upstream.refresh(self.embedding)


def _read_part(file: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """The tensors of one part, in the order of its bytes; copies, which no longer depend on the file."""
    try:
        size = file.stat().st_size
        if size != size_of(shapes):
            raise ValueError(f"it has {size} bytes, not {size_of(shapes)}")
        with file.open("rb") as source:
            return {
                name: torch.from_numpy(
                    np.fromfile(source, "<f4", math.prod(shapes[name])).astype(np.float32, copy=False)
                ).view(shapes[name])
                for name in sorted(shapes)
            }
    except (OSError, ValueError, RuntimeError) as error:
        raise HetnodeError(
            ErrorCode.CHECKPOINT_CORRUPT,
            f"The part of a checkpoint in {file} cannot be used: {error}.",
            "Remove the file; the part is fetched again.",
        ) from None
