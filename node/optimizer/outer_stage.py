"""The outer round of one stage as a transaction: propose, then commit or abort (SparseLoCo, eqs 1 and 2).

The anchor is the last committed value of the parameters, equal in every bit on all replicas. What this
replica learned since is anchor - local; what it learned and has not sent is the error feedback. Until a
round is committed neither changes, so an aborted round loses nothing: the next proposal covers it. A replica
that applies rounds without a proposal of its own follows: its local parameters move along with the anchor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from node.model.init import parameter_shapes
from protocol.algorithm.clipping import clipping_scales, outliers, payload_norm
from protocol.algorithm.outer_step import anchor_digest, apply_update
from protocol.algorithm.topk import sparsify_blocks
from protocol.errors import HetnodeError
from protocol.spec.run import RunSpec
from protocol.wire.payload_codec import PayloadLayout, decode, encode_tensor, join

WeightedPayload = tuple[bytes, float]
"""A payload's bytes and the weight of its owner."""


@dataclass(frozen=True)
class _Proposal:
    """A payload, and the error feedback that remains if all of it is applied.

    `covered` are the local parameters that it was made from, where training goes on before the decision.
    """

    payload: bytes
    error: dict[str, Tensor]
    covered: dict[str, Tensor] | None = None


class OuterStage:
    """Anchor and error feedback of one stage, and at most one pending proposal.

    Args:
        spec: the run.
        stage: the stage.
        parameters: the committed parameters to start from, copied. Error feedback starts at 0.

    Attributes:
        anchor: float32 CPU tensors by canonical name.
        error: error feedback e, likewise.
    """

    def __init__(self, spec: RunSpec, stage: int, parameters: Mapping[str, Tensor]) -> None:
        self.layout = PayloadLayout(parameter_shapes(spec, stage), spec.outer)
        self.anchor = {name: _float32(parameters[name]).clone() for name in self.layout.shapes}
        self.error = {name: torch.zeros_like(tensor) for name, tensor in self.anchor.items()}
        self._outer = spec.outer
        self._pending: _Proposal | None = None

    def map_tensors(self, change: Callable[[str, Tensor], Tensor]) -> None:
        """Put `change(key, tensor)` in the place of every tensor but the anchor, which others have as well.

        Keys are equal at every call until something is proposed or decided.
        """
        parts = {"error": self.error}
        if self._pending is not None:
            parts |= {"pending": self._pending.error, "covered": self._pending.covered or {}}
        for part, tensors in parts.items():
            for name, tensor in tensors.items():
                tensors[name] = change(f"{part}/{name}", tensor)

    def digest(self) -> str:
        """Digest of the anchor; equal on all replicas after equal rounds."""
        return anchor_digest(self.anchor)

    @torch.no_grad()
    def propose(self, local: Mapping[str, Tensor]) -> bytes | None:
        """The payload with this replica's contribution to the round; it is pending until commit or abort.

        Takes little more memory than the pending error feedback, which is one copy of the stage, and the
        payload, which is another where all values are sent. A proposal that is still pending is forgotten, as
        by an abort: for a caller that never got to offer it.

        Args:
            local: the parameters after the inner phase, any device. They must not change until the round
                is decided, or what they learn meanwhile would be lost by a commit; unless
                :meth:`remember` is called before they do.

        Returns:
            None where a parameter or its error feedback is not finite: this replica has nothing to give
            to the round, nothing is pending, and the caller takes part without a contribution. Its
            parameters do not recover by themselves; :meth:`reset` restarts them from the anchor.
        """
        self.abort()
        parts, pending = [], {}
        try:
            for name, layout in self.layout.tensors.items():
                pending[name] = torch.empty_like(self.anchor[name])
                sparse = sparsify_blocks(self._learned(name, local[name], pending[name]), layout)
                # The error feedback also takes in what quantization changed.
                sparse.add_to(pending[name].view(-1), -1.0)
                parts.append(encode_tensor(layout, sparse))
        except FloatingPointError:
            return None
        payload = join(self.layout, parts)
        self._pending = _Proposal(payload, pending)
        return payload

    def _learned(self, name: str, local: Tensor, kept: Tensor) -> Iterator[Tensor]:
        """beta e + (anchor - local) block by block, where local is; and all of it in `kept`, on the CPU.

        FloatingPointError where it is not finite.
        """
        local, device = local.detach().reshape(-1), local.device
        anchor, error, kept = self.anchor[name].view(-1), self.error[name].view(-1), kept.view(-1)
        for block in self.layout.tensors[name].blocks():
            run = slice(block.start, block.stop)
            in_place = kept[run] if device == kept.device else None
            learned = torch.sub(anchor[run].to(device), local[run], out=in_place)
            learned.add_(error[run].to(device), alpha=self._outer.error_decay)
            # A sum is the cheaper look: only if it is not finite the elements are looked at.
            if not math.isfinite(learned.sum()) and not learned.isfinite().all():
                raise FloatingPointError(name)
            if in_place is None:
                kept[run] = learned
            yield learned

    def remember(self, local: Mapping[str, Tensor]) -> None:
        """Training goes on from `local` before the round is decided: a commit keeps what it learns from here.

        To be called once, before local changes. Nothing where no proposal is pending.
        """
        if self._pending is not None and self._pending.covered is None:
            covered = {name: _float32(local[name]).clone() for name in self.anchor}
            self._pending = replace(self._pending, covered=covered)

    def screen(self, payloads: Sequence[bytes]) -> list[str]:
        """Why each of the gathered payloads of one round must not count, or "" where it may. Never raises.

        The norms of those that can be decoded are compared with each other, so give all that were gathered,
        this replica's own included.
        """
        problems, norms = [""] * len(payloads), {}
        for position, data in enumerate(payloads):
            try:
                norms[position] = payload_norm(decode(self.layout, data))
            except HetnodeError as error:
                problems[position] = error.cause
        for position, problem in zip(norms, outliers(list(norms.values())), strict=True):
            problems[position] = problem
        return problems

    @torch.no_grad()
    def commit(
        self, payloads: Sequence[WeightedPayload], mine_included: bool, local: Mapping[str, Tensor]
    ) -> None:
        """Move the anchor by exactly these payloads, and the local parameters with it, in place.

        Args:
            payloads: those of the manifest, in its order.
            mine_included: whether the pending proposal is one of them. If so, its error feedback becomes
                ours, together with what clipping cut off, and local := anchor, plus what it has learned
                since :meth:`remember`. If not, the proposal, if there is one, is dropped, the error feedback
                stays, and local moves along with the anchor, so that the next proposal still covers what it
                learned.
            local: as at the proposal, or further on after :meth:`remember`.

        Raises:
            HetnodeError: PAYLOAD_CORRUPT, before anything has changed; the proposal is still pending.
        """
        pending = self._pending if mine_included else None
        assert pending is not None or not mine_included, "a round cannot include what was not proposed"
        decoded = [decode(self.layout, data) for data, _ in payloads]
        weights = [weight for _, weight in payloads]
        moved = apply_update(self.anchor, decoded, weights, self._outer.learning_rate)
        for name, anchor in self.anchor.items():
            if pending is None:
                local[name].add_((moved[name] - anchor).to(local[name].device))
            elif pending.covered is None:
                local[name].copy_(moved[name])
            else:
                local[name].copy_(moved[name] + (_float32(local[name]) - pending.covered[name]))
        self.anchor = moved
        if pending is not None:
            mine = [data for data, _ in payloads].index(pending.payload)
            scale = clipping_scales([payload_norm(payload) for payload in decoded])[mine]
            self.error = pending.error
            if scale < 1.0:
                for name, sparse in decoded[mine].items():
                    sparse.add_to(self.error[name].view(-1), 1.0 - scale)
        self._pending = None

    def abort(self) -> None:
        """Forget the pending proposal, if any. Anchor, error feedback and local parameters are untouched."""
        self._pending = None

    @torch.no_grad()
    def reset(self, local: Mapping[str, Tensor]) -> None:
        """local := anchor, and no error feedback: give up what was learned and not sent.

        For a replica whose parameters are no longer finite, or whose error feedback is from before a payload
        of its own that was committed: to keep either would count twice what that payload has brought.
        """
        self.abort()
        for name, anchor in self.anchor.items():
            local[name].copy_(anchor)
            self.error[name].zero_()

    def load(self, parameters: Mapping[str, Tensor], local: Mapping[str, Tensor]) -> None:
        """Take another anchor, copied, as :meth:`reset` local := anchor. Names and shapes are the stage's."""
        self.anchor = {name: _float32(parameters[name]).clone() for name in self.layout.shapes}
        self.reset(local)


class EmbeddingFollower:
    """The token embedding of the last committed round, on a member that does not host stage 0.

    It applies stage 0's committed payloads to the one tensor, with the same arithmetic as
    :class:`OuterStage`, so its bits equal those of stage 0's hosts.

    Args:
        spec: the run.
        table_vd: the committed embedding to start from, copied.

    Attributes:
        table_vd: TE, float32 [V, d] on the CPU.
    """

    def __init__(self, spec: RunSpec, table_vd: Tensor) -> None:
        self.table_vd = _float32(table_vd).clone()
        self._layout = PayloadLayout(parameter_shapes(spec, 0), spec.outer)
        self._learning_rate = spec.outer.learning_rate

    def load(self, table_vd: Tensor) -> None:
        """Take the table of another round, copied."""
        self.table_vd = _float32(table_vd).clone()

    def commit(self, payloads: Sequence[WeightedPayload]) -> None:
        """Apply stage 0's payloads of one manifest, in its order. HetnodeError PAYLOAD_CORRUPT: no change."""
        decoded = [decode(self._layout, data) for data, _ in payloads]
        weights = [weight for _, weight in payloads]
        moved = apply_update({"emb": self.table_vd}, decoded, weights, self._learning_rate)
        self.table_vd = moved["emb"]


def _float32(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float32)
