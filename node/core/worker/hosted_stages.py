"""The stages of one member, with its links: forward, backward and evaluation passes of microbatches.

Shapes: b microbatch, L context, d width, k subspace width (d where the link is uncompressed), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import mul
from typing import cast

import torch
from torch import Tensor, nn

from node.core.model.link_table import LinkTable
from node.core.model.stage import Stage, backward_from
from node.core.model.transfer import to_device
from node.core.worker.compute import Compute
from node.core.worker.factories import TrainerFactories
from node.data.streamed import Samples
from node.ipc.worker_calls import Message
from protocol.codec.activation import (
    Packed,
    corrupt,
    pack_activation,
    pack_ids,
    unpack_activation,
    unpack_ids,
)
from protocol.math.frame_shift import shift_of
from protocol.math.subspace import ReceivingEnd, SendingEnd
from protocol.spec.link import UNCOMPRESSED
from protocol.spec.run import RunSpec
from protocol.types import StageRange

_SAFE = 2.0**15
"""Every quantizer of links represents values below this."""

Shard = Callable[[nn.Module, Iterable[nn.Module], torch.device], None]
"""Shards a module with its blocks over ranks: see node.ranks.sharding."""


@dataclass
class _InFlight:
    """What a forward pass keeps for its backward pass."""

    received: Tensor | None  # the leaf that collects the gradient for the member upstream; None at stage 0
    output: Tensor  # activations [b, L, d], or the loss at the last stage
    place: PassKey
    inputs: tuple[Tensor, Tensor] | None = None  # what `_run` gets, where pieces are computed again


PassKey = tuple[int, int, int]
"""Round, step and microbatch of a frame."""
FrameKey = tuple[int, int, int, int]
"""These and the direction, as :func:`shift_of` takes them."""
_FORWARD, _BACKWARD, _EVALUATE = range(3)


class HostedStages:
    """The stages that one member hosts, and its ends of the links to its neighbours.

    `shard` shards the parameters of each stage over the ranks of this peer; None leaves them whole.

    Raises HetnodeError DEVICE_UNAVAILABLE, as Compute.open.

    Attributes:
        modules: the stages, on `device`.
        upstream: receiving end of the link from the member with the previous stages. None on the member with
            stage 0, and before `connect`.
        downstream: sending end of the link to the member with the next stages. None on the member with the
            last stage, and before `connect`.
        table: the token table of the link upstream, on `device`; None if there is no such link, or no tables.
        losses: one per microbatch of the current inner step, on the member with the last stage.
    """

    def __init__(
        self,
        spec: RunSpec,
        stages: StageRange,
        compute: Compute,
        factories: TrainerFactories,
        shard: Shard | None = None,
    ) -> None:
        self._spec, self._stages, self._compute, self._factories = spec, stages, compute, factories
        self.device = compute.open()
        self.modules: dict[int, Stage] = {}
        for stage in stages:
            module = Stage(spec, stage, factories.initial(spec, stage))
            module.run_block = compute.run_block
            if shard is not None:
                shard(module, module.blocks, self.device)
            self.modules[stage] = module.to(self.device)
        self._is_sharded = shard is not None
        has_table = spec.link.table and stages.first > 0
        self.table = LinkTable(spec, stages.first).to(self.device) if has_table else None
        self.upstream: ReceivingEnd | None = None
        self.downstream: SendingEnd | None = None
        self._snapshot_vd: Tensor | None = None
        self.losses: list[Tensor] = []
        self.is_sound = True
        self._in_flight: dict[int, _InFlight] = {}
        self._is_last = spec.swarm.stages - 1 in stages
        self._replica = 0

    @property
    def table_values(self) -> dict[str, nn.Parameter] | None:
        """The live values of :attr:`table` by name."""
        return None if self.table is None else self.table.values

    @property
    def is_idle(self) -> bool:
        """Whether no inner step is in progress."""
        return not self._in_flight and not self.losses

    def connect(
        self, k_upstream: int | None, k_downstream: int | None, table_vd: Tensor | None, replica: int = 0
    ) -> None:
        """Create the links to both neighbours from their k. None: no neighbour. 0: an uncompressed link.

        `table_vd` is TE of the last committed round; a link upstream needs it, or a snapshot in its place.
        `replica` is the index of the replica in the plan.
        """
        self._replica = replica
        self.upstream = self.downstream = None
        if k_upstream is not None:
            table_vd = table_vd if self._snapshot_vd is None else self._snapshot_vd
            assert table_vd is not None
            basis_dd = self._factories.basis(self._spec, self._stages.first).to(self.device)
            self.upstream = self._factories.receiving_end(k_upstream, basis_dd, table_vd)
        if k_downstream is not None:
            basis_dd = self._factories.basis(self._spec, self._stages.stop).to(self.device)
            self.downstream = SendingEnd(k_downstream, basis_dd)

    def refresh_link(self, table_vd: Tensor) -> None:
        """Derive T_perp from TE of a newly committed round (eqs 3 and 4).

        The sending end needs no T_perp: it sends (X - T_perp) U, which equals X U because T_perp U = 0.
        """
        if self.upstream is not None and self._snapshot_vd is None:
            self.upstream.refresh(table_vd)

    def use_snapshot(self, snapshot_vd: Tensor) -> None:
        """Derive T_perp from this snapshot of TE, bfloat16 [V, d], until the next one; no more from TE."""
        self._snapshot_vd = snapshot_vd
        if self.upstream is not None:
            self.upstream.refresh(snapshot_vd)

    def forward(
        self, place: PassKey, received: Message | None, tokens: Samples | None, counts: bool = True
    ) -> Message | None:
        """Forward pass of one training microbatch. Returns the message for the next member, None at the last.

        Its loss is kept if it `counts`.

        The input is `received`, the message of the member upstream, or at stage 0 `tokens` [b, L + 1].
        Raises HetnodeError FRAME_CORRUPT for a message that cannot be used.
        """
        tokens_bl, x = self._enter(received, tokens, (*place, _FORWARD))
        leaf = None if received is None else x.requires_grad_()
        inputs = (x, tokens_bl) if self._compute.pieces > 1 else None
        with torch.set_grad_enabled(inputs is None):
            output = self._joined(x, tokens_bl)
        self._in_flight[place[-1]] = _InFlight(leaf, output, place, inputs)
        if self._is_last:
            if counts:
                self.losses.append(output.detach())
            return None
        return self._message(output.detach(), tokens_bl, (*place, _FORWARD))

    def backward(self, microbatch: int, received: Message | None, microbatches: float) -> Message | None:
        """Backward pass of a microbatch. Returns the gradient for the member upstream, None at the first.

        The loss of an inner step is the mean over its `microbatches`; infinitely many give no gradient.
        Raises as :meth:`forward`.
        """
        work = self._in_flight.pop(microbatch)
        outputs = [(1.0, work.output)] if work.inputs is None else self._pieces(*work.inputs)
        if received is None:
            # Only the last member divides: the gradients that the others receive contain the factor already.
            for share, output in outputs:
                torch.autograd.backward(output / (microbatches / share))
        else:
            assert self.downstream is not None, "a gradient arrived at the last member"
            dtype, shift = self._spec.link.dtype_of_gradients, self._shift(self._stages.stop, *work.place)
            wire = self._unpack("gradient", received, self.downstream, dtype, shift)
            gradient = self.downstream.expand_backward(wire)
            for (_, output), piece in zip(outputs, self._cut(gradient), strict=True):
                backward_from(output, piece.to(output.dtype))
        if work.received is None:
            return None
        assert self.upstream is not None
        assert work.received.grad is not None
        gradient = self.upstream.compress_backward(work.received.grad)
        dtype, shift = self._spec.link.dtype_of_gradients, self._shift(self._stages.first, *work.place)
        return Message(*self._pack("gradient", gradient, dtype, shift))

    def evaluate(self, microbatch: int, received: Message | None, tokens: Samples | None) -> Message | float:
        """As :meth:`forward`, for a validation microbatch; the last member returns the loss."""
        # FSDP keeps the tensors that it makes here, and training could not use those of inference mode.
        with torch.no_grad() if self._is_sharded else torch.inference_mode():
            frame = 0, 0, microbatch, _EVALUATE
            tokens_bl, x = self._enter(received, tokens, frame)
            output = self._run(self._with_table(x, tokens_bl), tokens_bl)
            return float(output) if self._is_last else self._message(output, tokens_bl, frame)

    def abandon(self) -> None:
        """Drop the losses and the activations of an unfinished inner step."""
        self._in_flight.clear()
        self.losses.clear()
        self.is_sound = True

    def _run(self, x: Tensor, tokens_bl: Tensor) -> Tensor:
        """Activations [b, L, d] after the stages hosted here, or the loss after the last stage of the run."""
        with self._compute.autocast():
            for module in self.modules.values():
                targets_bl = tokens_bl[:, 1:] if module.is_last else None
                x = module(x, targets_bl, tokens_bl[:, :-1])
            return x

    def _joined(self, x: Tensor, tokens_bl: Tensor) -> Tensor:
        """As :meth:`_run` with the link's table, one piece of the microbatch after the other."""
        shares, found = zip(*self._pieces(x, tokens_bl), strict=True)
        if len(found) == 1:
            return cast(Tensor, found[0])
        return (
            sum(map(mul, found, shares), start=torch.zeros_like(found[0]))
            if self._is_last
            else torch.cat(found)
        )

    def _pieces(self, x: Tensor, tokens_bl: Tensor) -> Iterator[tuple[float, Tensor]]:
        """The output of each piece of a microbatch, and the share of its samples."""
        for piece, tokens in zip(self._cut(x), self._cut(tokens_bl), strict=True):
            yield len(tokens) / len(tokens_bl), self._run(self._with_table(piece, tokens), tokens)

    def _cut(self, samples: Tensor) -> tuple[Tensor, ...]:
        return samples.tensor_split(min(self._compute.pieces, len(samples)))

    def _shift(
        self, boundary: int, round_number: int, step: int, microbatch: int, direction: int = _BACKWARD
    ) -> int:
        return shift_of(round_number, step, microbatch, boundary, direction, self._replica)

    def _enter(
        self, received: Message | None, tokens: Samples | None, frame: FrameKey
    ) -> tuple[Tensor, Tensor]:
        """Tokens [b, L + 1], and the input of the first hosted stage: ids [b, L] or activations [b, L, d]."""
        if received is None:
            assert tokens is not None, "the member that hosts stage 0 must pass samples"
            tokens_bl = to_device(torch.from_numpy(tokens).long(), self.device)
            return tokens_bl, tokens_bl[:, :-1]
        assert self.upstream is not None, "a message arrived at the first member"
        model = self._spec.model
        shape = self._spec.inner.microbatch_size, model.context + 1
        ids = unpack_ids(received.tensors, received.payload, "tokens", shape, model.vocabulary)
        tokens_bl = to_device(ids, self.device)
        shift = self._shift(self._stages.first, *frame)
        wire = self._unpack("activation", received, self.upstream, self._spec.link.dtype, shift)
        # X^ = X~ U^T + T_perp[ids]. Detached: gradients cross the link as messages, not by autograd.
        return tokens_bl, self.upstream.expand_forward(wire, tokens_bl[:, :-1]).detach()

    def _with_table(self, x: Tensor, tokens_bl: Tensor) -> Tensor:
        """`x` with what the table gives back of a link that compresses: X^ + R[ids]."""
        if self.table is None or self.upstream is None or self.upstream.k == UNCOMPRESSED:
            return x
        rows_bld: Tensor = self.table(tokens_bl[:, :-1])
        return x + rows_bld.to(x.dtype)

    def _unpack(
        self, name: str, received: Message, link: SendingEnd | ReceivingEnd, dtype: str, shift: int
    ) -> Tensor:
        """The tensor [b, L, k] of a message that crossed `link`, on the device. All its values are finite."""
        model = self._spec.model
        shape = self._spec.inner.microbatch_size, model.context, link.k or model.width
        wire = unpack_activation(received.tensors, received.payload, name, shape, dtype, shift)
        if not bool(wire.isfinite().all()):
            raise corrupt(f"Tensor '{name}' holds values that are not finite.")
        return to_device(wire, self.device)

    def _pack(self, name: str, values_blk: Tensor, dtype: str, shift: int) -> Packed:
        """The message of an activation or gradient [b, L, k], always of finite values.

        Zeros stand for values that are not finite, or become so on the wire; the step is not sound then.
        """
        packed = pack_activation(name, values_blk, dtype, shift)
        if not bool(values_blk.abs().amax() < _SAFE):
            seen = unpack_activation(*packed, name, tuple(values_blk.shape), dtype, shift)
            if not bool(seen.isfinite().all()):
                self.is_sound = False
                return pack_activation(name, torch.zeros_like(values_blk), dtype, shift)
        return packed

    def _message(self, output: Tensor, tokens_bl: Tensor, frame: FrameKey) -> Message:
        """The compressed output, and the token ids, which later members need for targets and T_perp[ids]."""
        assert self.downstream is not None, "the link downstream is not connected"
        compressed = self.downstream.compress_forward(output.float())
        dtype, shift = self._spec.link.dtype, self._shift(self._stages.stop, *frame)
        activation, activation_bytes = self._pack("activation", compressed, dtype, shift)
        ids, ids_bytes = pack_ids("tokens", tokens_bl, self._spec.model.vocabulary)
        return Message((*activation, *ids), activation_bytes + ids_bytes)
