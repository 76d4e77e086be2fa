"""The stages of one member between its links: forward, backward and evaluation passes of microbatches.

Shapes: b microbatch, L context, d width, k subspace width (d where the link is uncompressed), V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor, nn

from node.data.stream import Samples
from node.ipc.worker_calls import Message
from node.model.stage import Stage, next_token_loss
from node.worker.compute import Compute
from node.worker.factories import TrainerFactories
from protocol.algorithm.subspace import ReceivingEnd, SendingEnd
from protocol.spec.run import RunSpec
from protocol.types import StageRange
from protocol.wire.activation_codec import pack_activation, pack_ids, unpack_activation, unpack_ids


class HostedStagesState(TypedDict):
    """State dict of :class:`HostedStages`: parameters by stage and canonical name. Links are derived."""

    parameters: dict[int, dict[str, Tensor]]


@dataclass
class _InFlight:
    """What a forward pass leaves for its backward pass.

    Attributes:
        received: the leaf that collects the gradient for the member upstream; None at stage 0.
        output: activations [b, L, d]; at the last stage the loss.
    """

    received: Tensor | None
    output: Tensor


class HostedStages:
    """The stages that one member hosts, and its ends of the links to its neighbours.

    Args:
        spec: the run.
        stages: the stages hosted here.
        compute: how they are computed. Raises what Compute.open raises.
        factories: of initial parameters and links.

    Attributes:
        modules: by stage, on `device`.
        upstream: our end of the link to the member with the stages before; None where stage 0 is here, or
            before `connect`.
        downstream: our end of the link to the member with the stages after; None where the last stage is
            here, likewise.
        losses: of the microbatches of the inner step under way, on the member with the last stage.
    """

    def __init__(
        self, spec: RunSpec, stages: StageRange, compute: Compute, factories: TrainerFactories
    ) -> None:
        self._spec, self._stages, self._compute, self._factories = spec, stages, compute, factories
        self.device = compute.open()
        self.modules: dict[int, Stage] = {}
        for stage in stages:
            module = Stage(spec, stage, factories.initial(spec, stage))
            module.run_block = compute.run_block
            self.modules[stage] = module.to(self.device)
        self.upstream: ReceivingEnd | None = None
        self.downstream: SendingEnd | None = None
        self.losses: list[Tensor] = []
        self._in_flight: dict[int, _InFlight] = {}
        self._is_last = spec.swarm.stages - 1 in stages

    def parameters(self, stage: int) -> dict[str, nn.Parameter]:
        """The live parameters by canonical name."""
        return self.modules[stage].canonical_parameters()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left of an inner step."""
        return not self._in_flight and not self.losses

    def connect(self, k_upstream: int | None, k_downstream: int | None, table_vd: Tensor) -> None:
        """Make the links to both neighbours; None where there is none, 0 where activations go uncompressed.

        `table_vd` is TE of the last committed round.
        """

        def basis_dd(boundary: int) -> Tensor:
            return self._factories.basis(self._spec, boundary).to(self.device)

        self.upstream = self.downstream = None
        if k_upstream is not None:
            first = self._stages.first
            self.upstream = self._factories.receiving_end(k_upstream, basis_dd(first), table_vd)
        if k_downstream is not None:
            self.downstream = SendingEnd(k_downstream, basis_dd(self._stages.stop))

    def refresh_link(self, table_vd: Tensor) -> None:
        """Derive T_perp from TE of a newly committed round (eqs 3 and 4). The sending end needs none."""
        if self.upstream is not None:
            self.upstream.refresh(table_vd)

    def forward(self, microbatch: int, received: Message | None, tokens: Samples | None) -> Message | None:
        """Forward pass of one training microbatch; returns what the next member needs, or None at the last.

        Either `received`, the message of the member upstream, or at stage 0 `tokens` [b, L + 1] are given.
        Raises HetnodeError FRAME_CORRUPT for a message that cannot be used.
        """
        tokens_bl, x = self._enter(received, tokens)
        # The gradient for the member upstream collects in this leaf.
        leaf = None if received is None else x.requires_grad_()
        with self._compute.autocast():
            output = self._run(x)
            if self._is_last:
                # The loss is float32 whatever the precision of the products.
                output = next_token_loss(output.float(), tokens_bl[:, 1:])
        self._in_flight[microbatch] = _InFlight(leaf, output)
        if self._is_last:
            self.losses.append(output.detach())
            return None
        return self._message(output.detach(), tokens_bl)

    def backward(self, microbatch: int, received: Message | None, microbatches: int) -> Message | None:
        """Backward pass of a microbatch; returns the gradient for the member upstream, or None at the first.

        `microbatches` is their number in an inner step: the loss is their mean. Raises as :meth:`forward`.
        """
        work = self._in_flight.pop(microbatch)
        if received is None:
            torch.autograd.backward(work.output / microbatches)
        else:
            assert self.downstream is not None, "a gradient arrived at the last member"
            gradient = self._unpack("gradient", received, self.downstream)
            gradient = self.downstream.expand_backward(gradient)
            torch.autograd.backward(work.output, gradient.to(work.output.dtype))
        if work.received is None:
            return None
        assert self.upstream is not None
        assert work.received.grad is not None
        gradient = self.upstream.compress_backward(work.received.grad)
        return Message(*pack_activation("gradient", gradient, self._spec.link.dtype))

    @torch.inference_mode()
    def evaluate(self, received: Message | None, tokens: Samples | None) -> Message | float:
        """Forward pass of one validation microbatch; returns what the next member needs, or the loss.

        Arguments and errors are those of :meth:`forward`.
        """
        tokens_bl, x = self._enter(received, tokens)
        with self._compute.autocast():
            output = self._run(x)
            if self._is_last:
                return float(next_token_loss(output.float(), tokens_bl[:, 1:]))
        return self._message(output, tokens_bl)

    def abandon(self) -> None:
        """Drop all that is left of an inner step."""
        self._in_flight.clear()
        self.losses.clear()

    def take_losses(self) -> list[Tensor]:
        """The losses of the inner step that ends now."""
        losses, self.losses = self.losses, []
        return losses

    def state_dict(self) -> HostedStagesState:
        """The live parameters, not copied."""
        return {"parameters": {stage: dict(self.parameters(stage)) for stage in self.modules}}

    @torch.no_grad()
    def load_state_dict(self, state: HostedStagesState) -> None:
        """Take over the values in `state`, copied; stages that it does not hold keep theirs."""
        for stage, values in state["parameters"].items():
            for name, parameter in self.parameters(stage).items():
                parameter.copy_(values[name])

    def _run(self, x: Tensor) -> Tensor:
        for module in self.modules.values():
            x = module(x)
        return x

    def _enter(self, received: Message | None, tokens: Samples | None) -> tuple[Tensor, Tensor]:
        """Tokens [b, L + 1], and the input of the first hosted stage: ids [b, L] or activations [b, L, d]."""
        if received is None:
            assert tokens is not None, "the member that hosts stage 0 reads the samples"
            tokens_bl = torch.from_numpy(tokens).long().to(self.device)
            return tokens_bl, tokens_bl[:, :-1]
        assert self.upstream is not None, "a message arrived at the first member"
        model = self._spec.model
        shape = self._spec.inner.microbatch_size, model.context + 1
        ids = unpack_ids(received.tensors, received.payload, "tokens", shape, model.vocabulary)
        tokens_bl = ids.to(self.device)
        wire = self._unpack("activation", received, self.upstream)
        return tokens_bl, self.upstream.expand_forward(wire, tokens_bl[:, :-1]).detach()

    def _unpack(self, name: str, received: Message, link: SendingEnd | ReceivingEnd) -> Tensor:
        """The tensor [b, L, k] that crossed `link`, on the device."""
        model = self._spec.model
        shape = self._spec.inner.microbatch_size, model.context, link.k or model.width
        wire = unpack_activation(received.tensors, received.payload, name, shape, self._spec.link.dtype)
        return wire.to(self.device)

    def _message(self, output: Tensor, tokens_bl: Tensor) -> Message:
        """The compressed output, and the token ids: for the targets, and for T_perp[ids] of each link."""
        assert self.downstream is not None, "only the last member has no link downstream"
        compressed = self.downstream.compress_forward(output.float())
        activation, activation_bytes = pack_activation("activation", compressed, self._spec.link.dtype)
        ids, ids_bytes = pack_ids("tokens", tokens_bl, self._spec.model.vocabulary)
        return Message((*activation, *ids), activation_bytes + ids_bytes)
