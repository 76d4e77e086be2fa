"""One member's share of the training: its stages, inner optimizer, ends of the links, and outer state.

This is the only owner of the model in a node. It runs in the worker process, knows nothing of processes or
sockets, and is driven by :mod:`node.train.worker` one operation at a time.

Shapes: b micro-batch, L context, d width, k subspace width (d where the link is uncompressed).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from node import checkpoint
from node.data.stream import SampleStream
from node.model.init import initial_parameters
from node.model.stage import Stage, next_token_loss
from node.train.outer import EmbeddingFollower, OuterStage
from node.train.schedule import learning_rate
from protocol.errors import ErrorCode, HetnodeError
from protocol.round import tensor_digest
from protocol.spec import RunSpec
from protocol.subspace import LinkTransform, link_projection, orthonormal_basis
from protocol.types import StageRange, TensorHeader
from protocol.wire import pack_activation, pack_ids, unpack_activation, unpack_ids

EMBEDDING = "emb"


@dataclass(frozen=True)
class Message:
    """The tensors of one frame: what one member hands to the next."""

    tensors: tuple[TensorHeader, ...]
    payload: bytes


@dataclass
class _InFlight:
    """What a microbatch leaves behind between its forward and its backward pass."""

    tokens: Tensor
    received: Tensor | None
    output: Tensor


@dataclass(frozen=True)
class InnerResult:
    """What one inner phase did on this member. `loss` is NaN except on the last member."""

    loss: float
    tokens: int
    skipped_steps: int
    gradient_norm: float


class Trainer:
    """Stages, optimizer and outer state of one member. Create it once; connect it once the plan is known.

    Args:
        spec: the run.
        stages: the stages hosted here.
        device: a torch device name. The outer state stays on the CPU, so that all machines get the same bits.
        stream: the samples; only the member that hosts stage 0 needs one.
    """

    def __init__(
        self, spec: RunSpec, stages: StageRange, device: str = "cpu", stream: SampleStream | None = None
    ) -> None:
        self.spec, self.stages = spec, stages
        self.device = open_device(device)
        self.outer = {}
        self.modules = {}
        for stage in stages:
            module = Stage(spec, stage)
            self.outer[stage] = OuterStage(spec, stage, module.canonical_parameters())
            self.modules[stage] = module.to(self.device)
        # A member downstream of stage 0 keeps the committed embedding too: both ends of a link derive
        # T_perp from it.
        self._follower = (
            None if 0 in stages else EmbeddingFollower(spec, initial_parameters(spec, 0)[EMBEDDING])
        )
        self._optimizer = _adamw(spec, self.modules.values())
        self._stream = stream
        self._samples: range | None = None
        self._upstream: LinkTransform | None = None
        self._downstream: LinkTransform | None = None
        self._in_flight: dict[int, _InFlight] = {}
        self._reset_phase(1)
        self._validation: list[float] = []
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

    def connect(self, k_upstream: int | None, k_downstream: int | None) -> None:
        """Set the links to both neighbours; None where there is none, 0 where activations go uncompressed."""
        basis_dd = None
        if k_upstream is not None or k_downstream is not None:
            basis_dd = orthonormal_basis(self.spec.model.width, self.spec.seed).to(self.device)

        def link(k: int | None) -> LinkTransform | None:
            if k is None or basis_dd is None:
                return None
            return link_projection(k, basis_dd, self.embedding)

        self._upstream, self._downstream = link(k_upstream), link(k_downstream)

    def begin_round(self, round_: int, samples: range) -> None:
        """Start the inner phase of `round_`. `samples`: ordinals of this replica's samples in it."""
        assert len(samples) == self.spec.samples_per_round, "the plan and the spec disagree"
        self._samples = samples
        self._in_flight.clear()
        self._optimizer.zero_grad(set_to_none=True)
        self._reset_phase(round_)

    def forward(self, step: int, microbatch: int, received: Message | None) -> Message | None:
        """Forward pass of one training microbatch; returns what the next member needs, or None at the last.

        `received` is the former member's message; None on the member that hosts stage 0, which draws the
        samples itself. Raises HetnodeError FRAME_CORRUPT for a message that cannot be used.
        """
        tokens, x, leaf = self._enter(received, lambda: self._training_tokens(step, microbatch))
        with self._autocast():
            output = self._run_stages(x)
            if self.hosts_last:
                output = next_token_loss(output.float(), tokens[:, 1:])
        if self.hosts_last:
            self._losses.append(output.detach())
        self._in_flight[microbatch] = _InFlight(tokens, leaf, output)
        return None if self.hosts_last else self._forward_message(output.detach(), tokens)

    def backward(self, microbatch: int, received: Message | None) -> Message | None:
        """Backward pass of a microbatch; returns the gradient for the former member, or None at the first."""
        work = self._in_flight.pop(microbatch)
        if received is None:
            (work.output / self.spec.inner.microbatches).backward()
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

        A norm that is not finite skips the step on every member alike, since all get the same norm.
        """
        self._norm = norm
        if math.isfinite(norm):
            scale = min(1.0, self.spec.inner.clip_norm / (norm + 1e-6))
            for parameter in self._parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)
            now = (self._round - 1) * self.spec.inner.steps + step
            rate = learning_rate(self.spec.inner, now, self.spec.total_steps)
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()
        else:
            self._skipped += 1
        self._optimizer.zero_grad(set_to_none=True)

    def end_inner_phase(self) -> InnerResult:
        """What the inner phase did. Only the last member knows the loss."""
        loss = float(torch.stack(self._losses).double().mean()) if self._losses else math.nan
        tokens = self.spec.samples_per_round * self.spec.model.context
        return InnerResult(loss, tokens, self._skipped, self._norm)

    def evaluate(self, microbatch: int, received: Message | None) -> Message | None:
        """Forward pass of one validation microbatch, in this replica's own forward mode."""
        tokens, x, _ = self._enter(received, lambda: self._validation_tokens(microbatch))
        with torch.inference_mode(), self._autocast():
            output = self._run_stages(x)
            if self.hosts_last:
                self._validation.append(float(next_token_loss(output.float(), tokens[:, 1:])))
                return None
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
        return payload

    def screen(self, stage: int, payloads: Sequence[bytes]) -> list[str]:
        """Why each of the payloads gathered for a round of `stage` must not count, or "" where it may."""
        return self.outer[stage].screen(payloads)

    def commit(self, stage: int, payloads: Sequence[tuple[bytes, float]], mine_included: bool) -> str:
        """Apply the committed (payload, weight) pairs in order. Returns the digest of the new anchor."""
        self.outer[stage].commit(payloads, mine_included, self._local(stage))
        if stage == 0:
            self._refresh_links()
        return self.outer[stage].digest()

    def commit_embedding(self, payloads: Sequence[tuple[bytes, float]]) -> str:
        """Apply stage 0's committed update to the embedding kept here. Returns the digest of the table."""
        assert self._follower is not None, "the host of stage 0 commits the whole stage"
        self._follower.commit(payloads)
        self._refresh_links()
        return self.embedding_digest()

    def embedding_digest(self) -> str:
        """Digest of TE of the last committed round: equal on all members of all replicas."""
        return tensor_digest(EMBEDDING, self.embedding)

    def abort(self, stage: int) -> None:
        """The round is aborted: anchor, error feedback and local parameters stay; the inner phase goes on."""
        self.outer[stage].abort()

    def write_checkpoint(self, folder: Path, round_: int) -> None:
        """Write the anchors of the hosted stages: the global model as committed in `round_`."""
        checkpoint.write(
            folder, self.spec, round_, {stage: outer.anchor for stage, outer in self.outer.items()}
        )

    def _reset_phase(self, round_: int) -> None:
        self._round = round_
        self._losses: list[Tensor] = []
        self._norm = math.nan
        self._skipped = 0

    def _local(self, stage: int) -> Mapping[str, Tensor]:
        return self.modules[stage].canonical_parameters()

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for module in self.modules.values() for parameter in module.parameters()]

    def _run_stages(self, x: Tensor) -> Tensor:
        for module in self.modules.values():
            x = module(x)
        return x

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

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
        compressed = self._downstream.compress_forward(output.float(), tokens[:, :-1])
        activation, activation_bytes = pack_activation("activation", compressed, self.spec.link.dtype)
        ids, ids_bytes = pack_ids("tokens", tokens, self.spec.model.vocabulary)
        return Message((*activation, *ids), activation_bytes + ids_bytes)

    def _wire_shape(self, link: LinkTransform) -> tuple[int, int, int]:
        model = self.spec.model
        return self.spec.inner.microbatch_size, model.context, link.k or model.width

    def _training_tokens(self, step: int, microbatch: int) -> np.ndarray:
        assert self._stream is not None
        assert self._samples is not None
        size = self.spec.inner.microbatch_size
        first = step * self.spec.samples_per_step + microbatch * size
        return self._stream.read(self._samples[first : first + size])

    def _validation_tokens(self, microbatch: int) -> np.ndarray:
        assert self._stream is not None
        size = self.spec.inner.microbatch_size
        if (
            self._validation_samples is None
        ):  # the same ones all run long; a streamed source starts anew for them
            self._validation_samples = self._stream.validation(self.spec.data.validation_batches * size)
        return self._validation_samples[microbatch * size : (microbatch + 1) * size]

    def _refresh_links(self) -> None:
        for link in (self._upstream, self._downstream):
            if link is not None:
                link.refresh(self.embedding)


def open_device(name: str) -> torch.device:
    """The torch device `name`, tried out. Raises HetnodeError DEVICE_UNAVAILABLE."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise HetnodeError(
            ErrorCode.DEVICE_UNAVAILABLE,
            f"The device '{name}' cannot be used: {str(error).splitlines()[0].rstrip('.')}.",
            "Give --device cpu, or check the driver and the installed torch build.",
        ) from None
    return device


def _adamw(spec: RunSpec, modules) -> torch.optim.AdamW:  # type: ignore[no-untyped-def]
    """AdamW over all hosted stages. Decay on matrices only, and never on the embedding: a replica that is cut
    into members would otherwise disagree with one that is not about the table they share."""
    decayed, plain = [], []
    for module in modules:
        for name, parameter in module.canonical_parameters().items():
            (decayed if parameter.dim() == 2 and name != EMBEDDING else plain).append(parameter)
    inner = spec.inner
    return torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": inner.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ],
        lr=inner.learning_rate,
        betas=(inner.beta1, inner.beta2),
        eps=inner.epsilon,
    )
