"""The outer round of one stage as a transaction: propose, then commit or abort (SparseLoCo, eqs 1 and 2).

The anchor is the last committed value of the parameters; together with the state of the outer optimizer it is
equal in every bit on all replicas. anchor - local is what this replica has learned since. The error feedback
is what it has learned and not sent. Until a round is committed neither changes, so an aborted round loses
nothing: the next proposal covers it. A replica that applies rounds without a proposal of its own follows: its
local parameters move along with the anchor.

With momentum (protocol.algorithm.outer_optimizer) the same holds. The optimizer takes one step per committed
round and none for an aborted one, so its state depends on the committed rounds alone, and replaying these
gives the same bits. Error feedback counts what was put into the pseudo-gradient, whatever the optimizer makes
of it. With ``outer.overlap`` the step is taken later, like every update.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypedDict

import torch
from torch import Tensor

from node.model.init import EMBEDDING, parameter_shapes
from protocol.algorithm.clipping import clipping_scales, outliers, payload_norm
from protocol.algorithm.outer_optimizer import initial_state, outer_optimizer
from protocol.algorithm.outer_step import anchor_digest, apply_update
from protocol.algorithm.topk import sparsify_blocks
from protocol.errors import HetnodeError
from protocol.spec.run import RunSpec
from protocol.wire.payload_codec import PayloadLayout, decode, encode_tensor, join

WeightedPayload = tuple[bytes, float]
"""A payload's bytes and the weight of its owner."""


class ProposalState(TypedDict):
    payload: bytes
    error: dict[str, Tensor]
    covered: dict[str, Tensor] | None


class CommittedState(TypedDict):
    """What all replicas hold alike. `optimizer` is empty where the outer optimizer has no state."""

    anchor: dict[str, Tensor]
    optimizer: dict[str, Tensor]


class OuterStageState(CommittedState):
    """State dict of :class:`OuterStage`: float32 tensors on the CPU by canonical name."""

    error: dict[str, Tensor]
    pending: ProposalState | None


@dataclass(frozen=True)
class _Proposal:
    """A payload, and the error feedback that remains if all of it is applied.

    `covered` are the local parameters that it was made from, where training continues before the decision.
    """

    payload: bytes
    error: dict[str, Tensor]
    covered: dict[str, Tensor] | None = None


class OuterStage:
    """Anchor, optimizer state and error feedback of one stage, and at most one pending proposal.

    Args:
        spec: the run.
        stage: the stage.
        parameters: the committed parameters before round 1, copied. All other state starts at 0.

    Attributes:
        anchor: float32 CPU tensors by canonical name. A commit replaces them; nothing changes one in place,
            so replicas of one process may share them.
        optimizer_state: of the outer optimizer, named by outer_optimizer.state_name, likewise.
        error: error feedback e, by canonical name.
    """

    def __init__(self, spec: RunSpec, stage: int, parameters: Mapping[str, Tensor]) -> None:
        self.layout = PayloadLayout(parameter_shapes(spec, stage), spec.outer)
        self._outer, self._optimizer = spec.outer, outer_optimizer(spec.outer)
        self.anchor = {name: _float32(parameters[name]).clone() for name in self.layout.shapes}
        self.optimizer_state = initial_state(self.anchor, self._optimizer.slots)
        self.error = {name: torch.zeros_like(tensor) for name, tensor in self.anchor.items()}
        self._pending: _Proposal | None = None

    @property
    def committed(self) -> dict[str, Tensor]:
        """All that replicas agree on: anchor and optimizer state, by name."""
        return self.anchor | self.optimizer_state

    @property
    def pending_payload(self) -> bytes | None:
        """The payload of the proposal that is not decided yet."""
        return None if self._pending is None else self._pending.payload

    def digest(self) -> str:
        """Digest of :attr:`committed`; equal on all replicas after equal rounds."""
        return anchor_digest(self.committed)

    def state_dict(self) -> OuterStageState:
        """The live tensors, not copied."""
        pending = self._pending
        return {
            "anchor": self.anchor,
            "optimizer": self.optimizer_state,
            "error": self.error,
            "pending": None
            if pending is None
            else {"payload": pending.payload, "error": pending.error, "covered": pending.covered},
        }

    def load_state_dict(self, state: OuterStageState) -> None:
        """Take over `state`, copied. Names and shapes are the stage's."""
        self.anchor, self.optimizer_state = _copied(state["anchor"]), _copied(state["optimizer"])
        self.error, pending = _copied(state["error"]), state["pending"]
        self._pending = None
        if pending is not None:
            covered = None if pending["covered"] is None else _copied(pending["covered"])
            self._pending = _Proposal(pending["payload"], _copied(pending["error"]), covered)

    @torch.no_grad()
    def propose(self, local: Mapping[str, Tensor]) -> bytes | None:
        """The payload with this replica's contribution to the round; it is pending until commit or abort.

        Takes little more memory than the pending error feedback, which is one copy of the stage, and the
        payload, which is another where all values are sent. A proposal that is still pending is dropped, as
        by an abort: for a caller that never got to offer it.

        Args:
            local: the parameters after the inner phase, any device. They must not change until the round
                is decided, or a commit would lose what they learn meanwhile; unless
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
        """beta e + (anchor - local), block by block on the device of `local`, and whole in `kept` on the CPU.

        FloatingPointError where it is not finite.
        """
        local, device = local.detach().reshape(-1), local.device
        anchor, error, kept = self.anchor[name].view(-1), self.error[name].view(-1), kept.view(-1)
        for block in self.layout.tensors[name].blocks():
            run = slice(block.start, block.stop)
            in_place = kept[run] if device == kept.device else None
            learned = torch.sub(anchor[run].to(device), local[run], out=in_place)
            learned.add_(error[run].to(device), alpha=self._outer.error_decay)
            # A sum is the cheaper test; only where it is not finite the elements are tested.
            if not math.isfinite(learned.sum()) and not learned.isfinite().all():
                raise FloatingPointError(name)
            if in_place is None:
                kept[run] = learned
            yield learned

    def remember(self, local: Mapping[str, Tensor]) -> None:
        """Training continues from `local` before the round is decided: a commit keeps what it then learns.

        To be called once, before local changes. Does nothing where no proposal is pending.
        """
        if self._pending is not None and self._pending.covered is None:
            self._pending = replace(
                self._pending, covered=_copied({name: local[name] for name in self.anchor})
            )

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
        committed = apply_update(self.committed, decoded, weights, self._optimizer)
        for name, anchor in self.anchor.items():
            if pending is None:
                # What this replica has learned, anchor - local, stays as it was for the next proposal.
                local[name].add_((committed[name] - anchor).to(local[name].device))
            elif pending.covered is None:
                local[name].copy_(committed[name])
            else:
                local[name].copy_(committed[name] + (_float32(local[name]) - pending.covered[name]))
        self._take(committed)
        if pending is not None:
            mine = [data for data, _ in payloads].index(pending.payload)
            scale = clipping_scales([payload_norm(payload) for payload in decoded])[mine]
            self.error = pending.error
            if scale < 1.0:
                # What clipping kept out of the round was not sent.
                for name, sparse in decoded[mine].items():
                    sparse.add_to(self.error[name].view(-1), 1.0 - scale)
        self._pending = None

    def abort(self) -> None:
        """Drop the pending proposal, if any. All else is untouched, the optimizer's state included."""
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

    def load(self, committed: Mapping[str, Tensor], local: Mapping[str, Tensor]) -> None:
        """Take what is committed after another round, copied, and :meth:`reset` local to it.

        Names and shapes are the stage's; an optimizer state that is not given is 0, as before round 1.
        """
        self._take(_with_state(committed, self.layout.shapes, self._optimizer.slots))
        self.reset(local)

    def _take(self, committed: Mapping[str, Tensor]) -> None:
        self.anchor = {name: committed[name] for name in self.layout.shapes}
        self.optimizer_state = {name: tensor for name, tensor in committed.items() if name not in self.anchor}


class EmbeddingFollower:
    """The token embedding of the last committed round, on a member that does not host stage 0.

    It applies stage 0's committed payloads to the one tensor, with the same arithmetic as
    :class:`OuterStage`, so its bits, and those of its optimizer state, equal those of stage 0's hosts.

    Args:
        spec: the run.
        table_vd: the committed embedding before round 1, copied.

    Attributes:
        committed: TE, float32 [V, d] on the CPU, and its optimizer state, by name. A commit replaces the
            tensors; nothing changes one in place.
    """

    def __init__(self, spec: RunSpec, table_vd: Tensor) -> None:
        self._layout = PayloadLayout(parameter_shapes(spec, 0), spec.outer)
        self._optimizer = outer_optimizer(spec.outer)
        self.committed: dict[str, Tensor] = {}
        self.load({EMBEDDING: table_vd})

    @property
    def table_vd(self) -> Tensor:
        """TE, float32 [V, d] on the CPU."""
        return self.committed[EMBEDDING]

    def load(self, committed: Mapping[str, Tensor]) -> None:
        """Take the table after another round, copied; an optimizer state that is not given is 0."""
        self.committed = _with_state(committed, [EMBEDDING], self._optimizer.slots)

    def commit(self, payloads: Sequence[WeightedPayload]) -> None:
        """Apply stage 0's payloads of one manifest, in its order. HetnodeError PAYLOAD_CORRUPT: no change."""
        decoded = [decode(self._layout, data) for data, _ in payloads]
        weights = [weight for _, weight in payloads]
        self.committed = apply_update(self.committed, decoded, weights, self._optimizer)


def _with_state(
    committed: Mapping[str, Tensor], names: Iterable[str], slots: Sequence[str]
) -> dict[str, Tensor]:
    """Copies of the parameters `names` and their optimizer state, which is 0 where `committed` has none."""
    parameters = _copied({name: committed[name] for name in names})
    initial = initial_state(parameters, slots)
    return parameters | _copied({name: committed.get(name, zero) for name, zero in initial.items()})


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: _float32(tensor).clone() for name, tensor in tensors.items()}


def _float32(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float32)
