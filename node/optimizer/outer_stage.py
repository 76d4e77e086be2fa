"""The outer round of one stage as a transaction: propose, then commit or abort (SparseLoCo, eqs 1 and 2).

The anchor is the last committed value of the parameters. The anchor and the state of the outer optimizer are
equal in every bit on all replicas. anchor - local is the progress of this replica since that commit. The
error feedback is the progress that this replica has not sent yet. Anchor and error feedback change only when
a round is committed, so an aborted round loses nothing: the next proposal contains its progress too.

The same rules hold with momentum (protocol.algorithm.outer_optimizer). The optimizer takes one step per
committed round and none for an aborted round, so replaying the committed rounds gives the same bits. Error
feedback counts what was sent in the pseudo-gradient, not what the optimizer makes of it.

Training that continues beyond a proposal starts from an estimate of the next anchor: what a round of this
replica's payload alone would commit (eager updates, arXiv 2502.12996). A commit takes the anchor in place of
the estimate, an abort the parameters of the proposal, so both keep only the training.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypedDict

import torch
from torch import Tensor

from node.model.payloads import payload_layout
from node.model.transfer import copy_into, to_device
from node.optimizer.outcome import Outcome, ReducedResult, contents_of, left_out
from node.ranks.ownership import Ownership
from node.ranks.remote_tensors import SharedTensor, with_all
from protocol.algorithm.agreement import AgreementMeter
from protocol.algorithm.clipping import SentTensor, outliers, payload_norm
from protocol.algorithm.comparison import Agreement, Comparison
from protocol.algorithm.outer_optimizer import committed_shapes, initial_state, outer_optimizer, state_name
from protocol.algorithm.outer_step import anchor_digest, apply_update
from protocol.algorithm.topk import sparsify_blocks
from protocol.errors import HetnodeError
from protocol.spec.run import RunSpec
from protocol.wire.payload_codec import decode, encode_tensor, join


class Proposal(TypedDict):
    """A payload, and the error feedback that remains if all of it is applied.

    `covered` holds the local parameters at the time of the proposal, if training continues before the round
    is decided; otherwise None. That training starts from an estimate, not from `covered`.
    """

    payload: bytes
    error: dict[str, Tensor]
    covered: dict[str, Tensor] | None


class CommittedState(TypedDict):
    """State that is equal on all replicas. `optimizer` is empty if the outer optimizer has no state."""

    anchor: dict[str, Tensor]
    optimizer: dict[str, Tensor]


class OuterStageState(CommittedState):
    """State dict of :class:`OuterStage`: float32 tensors on the CPU by canonical name."""

    error: dict[str, Tensor]
    pending: Proposal | None


class OuterStage:
    """Anchor, optimizer state and error feedback of one stage, and at most one pending proposal.

    `parameters` are the committed ones before round 1; they are copied. All other state starts at 0.

    Where a peer has several ranks, each has in `parameters` and `local` only those that it owns, and keeps
    their state. All ranks call `digest`, `propose` and `commit` together, in the same order.

    Attributes:
        layout: the form of the payloads.
        ownership: which rank owns which parameter.
        anchor: float32 CPU tensors by canonical name. A commit replaces the tensors and never changes one in
            place, so replicas in one process may share them.
        optimizer_state: state of the outer optimizer, named by outer_optimizer.state_name. Also replaced,
            never changed in place.
        error: error feedback e, by canonical name.
        pending: the proposal of the round that is not decided yet.
        progress_norm, error_norm: L2 norms |anchor - local| and |beta e| of the two parts of the last
            proposal, before compression; each with a relative error below 1e-5.
        comparison: which payload the next commits measure; None measures nothing.
        agreement: what the last commit has measured; None if nothing, or if it was not finite.
    """

    def __init__(
        self,
        spec: RunSpec,
        stage: int,
        parameters: Mapping[str, Tensor],
        ownership: Ownership = Ownership(),  # noqa: B008  frozen
    ) -> None:
        self.layout, self.ownership = payload_layout(spec, stage), ownership
        self._outer, self._optimizer = spec.outer, outer_optimizer(spec.outer)
        self._names = [name for name in self.layout.shapes if ownership.is_mine(name)]
        self.anchor = {name: _float32(parameters[name]).clone() for name in self._names}
        self.optimizer_state = initial_state(self.anchor, self._optimizer.slots)
        self.error = {name: torch.zeros_like(tensor) for name, tensor in self.anchor.items()}
        self.pending: Proposal | None = None
        self._squares = [0.0, 0.0]  # of progress and error feedback, while a proposal is made
        self.progress_norm = self.error_norm = 0.0
        self.comparison: Comparison | None = None
        self.agreement: Agreement | None = None

    @property
    def committed(self) -> dict[str, Tensor]:
        """The state that is equal on all replicas, by name: the anchor and optimizer state kept here."""
        return self.anchor | self.optimizer_state

    def digest(self) -> str:
        """Digest of the :attr:`committed` of all ranks. "" except on rank 0.

        Equal on all replicas that have committed the same rounds.
        """
        return with_all(self.ownership.group, self.shared_committed(), anchor_digest) or ""

    def shared_committed(self) -> dict[str, SharedTensor]:
        """The :attr:`committed` of all ranks, for rank 0 to read."""
        return self.ownership.shared(committed_shapes(self.layout.shapes, self._outer), self.committed)

    def shapes_of(self, names: Iterable[str]) -> dict[str, tuple[int, ...]]:
        """The shapes of these committed tensors."""
        shapes = committed_shapes(self.layout.shapes, self._outer)
        return {name: shapes[name] for name in names}

    def state_dict(self) -> OuterStageState:
        """The live tensors, not copied."""
        return {
            "anchor": self.anchor,
            "optimizer": self.optimizer_state,
            "error": self.error,
            "pending": self.pending,
        }

    def load_state_dict(self, state: OuterStageState) -> None:
        """Copy `state`. Names and shapes match the stage."""
        self.anchor, self.optimizer_state = _copied(state["anchor"]), _copied(state["optimizer"])
        self.error, pending = _copied(state["error"]), state["pending"]
        self.pending = None
        if pending is not None:
            covered = None if pending["covered"] is None else _copied(pending["covered"])
            error = _copied(pending["error"])
            self.pending = {"payload": pending["payload"], "error": error, "covered": covered}

    @torch.no_grad()
    def propose(self, local: Mapping[str, Tensor]) -> bytes | None:
        """The payload with this replica's contribution to the round. It is pending until commit or abort.

        None if a parameter or its error feedback is not finite. Then nothing is pending, and the replica
        takes part in the round without a contribution. :meth:`reset` restarts it from the anchor.

        Memory: the pending error feedback (one copy of the stage) and the payload (up to another copy if all
        values are sent). An older proposal that is still pending is dropped, as in :meth:`abort`: its caller
        failed before it sent the payload.

        `local` are the parameters after the inner phase, on any device. If they change before the round is
        decided, call :meth:`remember` first; otherwise a commit loses the changes.
        """
        self.abort(local)
        self._squares = [0.0, 0.0]
        parts, error = {}, {}
        try:
            for name in self._names:
                layout = self.layout.tensors[name]
                error[name] = torch.empty_like(self.anchor[name])
                sparse = sparsify_blocks(self._learned(name, local[name], error[name]), layout)
                # e'' = e' - sent, with the decoded values: error feedback also keeps the quantization error.
                sparse.add_to(error[name].view(-1), -1.0)
                parts[name] = encode_tensor(layout, sparse)
        except FloatingPointError:
            parts = {}
        payload = self._joined(parts)
        if payload is not None:
            self.progress_norm, self.error_norm = map(math.sqrt, self.ownership.group.totals(self._squares))
            self.pending = {"payload": payload, "error": error, "covered": None}
        return payload

    def _joined(self, parts: Mapping[str, bytes]) -> bytes | None:
        """The payload of the encoded tensors of all ranks. None if a rank lacks some of its own."""
        group, found = self.ownership.group, {}
        if group.any(parts.keys() != {*self._names}):
            return None  # nothing is pending: a round never sees half a stage
        for rank, data in enumerate(group.exchange(b"".join(parts.values()))):
            start = 0
            for name, length in self.layout.lengths.items():
                if self.ownership.owner_of(name) == rank:
                    found[name] = data[start : start + length]
                    start += length
        return join(self.layout, (found[name] for name in self.layout.tensors))

    def _learned(self, name: str, local: Tensor, kept: Tensor) -> Iterator[Tensor]:
        """Yield e' = beta e + (anchor - local) (eq. 1) in blocks on the device of `local`.

        Also writes e' to `kept`, which is on the CPU. Raises FloatingPointError if a value is not finite.
        """
        local, device = local.detach().reshape(-1), local.device
        anchor, error, kept = self.anchor[name].view(-1), self.error[name].view(-1), kept.view(-1)
        for block in self.layout.tensors[name].blocks():
            run = slice(block.start, block.stop)
            # On the CPU the block is computed directly in `kept`, which saves one copy.
            in_place = kept[run] if device == kept.device else None
            learned = torch.sub(to_device(anchor[run], device), local[run], out=in_place)
            sent_later = to_device(error[run], device)
            self._squares[0] += float(learned.dot(learned))
            self._squares[1] += float(sent_later.dot(sent_later)) * self._outer.error_decay**2
            learned.add_(sent_later, alpha=self._outer.error_decay)
            # The sum is a cheap first test. Finite values can overflow it, so then test each element.
            if not math.isfinite(learned.sum()) and not learned.isfinite().all():
                raise FloatingPointError(name)
            if in_place is None:
                kept[run] = learned
            yield learned

    @torch.no_grad()
    def remember(self, local: Mapping[str, Tensor]) -> None:
        """Save a copy of `local`, so that a later commit keeps the training that follows this call.

        It also sets `local` to the estimate of the next anchor. Call it before `local` changes. Does nothing
        if no proposal is pending, or if it was called for this proposal.
        """
        if self.pending is not None and self.pending["covered"] is None:
            covered = _copied({name: local[name] for name in self.anchor})
            self.pending = {**self.pending, "covered": covered}
            for name, start in self._starts(self.pending["payload"]):
                copy_into(local[name], start)

    def _starts(self, payload: bytes) -> Iterator[tuple[str, Tensor]]:
        """Name and value of the parameters from which training continues beyond a proposal: the estimate."""
        sent = decode(self.layout, payload)
        for name, anchor in self.anchor.items():
            gradient = torch.zeros_like(anchor)
            sent[name].add_to(gradient.view(-1), 1.0)
            state = {slot: self.optimizer_state[state_name(name, slot)] for slot in self._optimizer.slots}
            yield name, self._optimizer.step(anchor, gradient, state)[0]

    def screen(self, payloads: Sequence[bytes]) -> list[str]:
        """For each gathered payload of one round: the reason to reject it, or "" to accept. Never raises.

        The norms of the decodable payloads are compared with each other, so pass all gathered payloads,
        including the one of this replica.
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
    def commit(self, outcome: Outcome, mine_included: bool, local: Mapping[str, Tensor]) -> None:
        """Apply exactly this outcome to the anchor (eq. 2) and update the local parameters in place.

        Args:
            outcome: the payloads of the manifest in its order, or the result of the reducers.
            mine_included: whether the pending proposal is part of it. If true, error feedback becomes that
                of the proposal plus the part that clipping removed or reducers missed, and local becomes the
                new anchor plus the training since :meth:`remember`. If false, a pending proposal is dropped
                as in :meth:`abort`, error feedback stays, and local moves by the same amount as the anchor,
                so that the next proposal still contains this replica's progress.
            local: the parameters as they were at the proposal; after :meth:`remember` they may have changed.

        Raises:
            HetnodeError: PAYLOAD_CORRUPT; nothing has changed and the proposal is still pending.
        """
        pending = self.pending if mine_included else None
        assert pending is not None or not mine_included, "the round includes a payload not proposed here"
        # Everything that can fail comes first; only then the state changes.
        contents, weights = contents_of(self.layout, outcome)
        meter = None
        if self.comparison and not isinstance(outcome, ReducedResult):
            meter = AgreementMeter(
                self.comparison, [decode(self.layout, data) for data, _ in outcome], weights
            )
        committed = self._updated(contents, weights, meter)
        self.agreement = meter.result() if meter else None
        if pending is None:
            self.abort(local)
            for name, anchor in self.anchor.items():
                # anchor - local stays the same, so the next proposal still contains this progress.
                local[name].add_((committed[name] - anchor).to(local[name].device))
        elif pending["covered"] is None:
            for name in self.anchor:
                copy_into(local[name], committed[name])
        else:
            # The new anchor plus the training since the proposal, which no payload contains yet.
            for name, start in self._starts(pending["payload"]):
                local[name].copy_(committed[name] + (_float32(local[name]) - start))
        self._take(committed)
        if pending is not None:
            self.error = pending["error"]
            unsent, share = left_out(self.layout, outcome, pending["payload"], contents)
            if share > 0.0:
                # The round has not applied all of the payload. Keep the rest in the error feedback.
                for name, error in self.error.items():
                    unsent[name].add_to(error.view(-1), share)
        self.pending = None

    def _updated(
        self,
        payloads: Sequence[Mapping[str, SentTensor]],
        weights: Sequence[float],
        meter: AgreementMeter | None,
    ) -> dict[str, Tensor]:
        """The committed state after these payloads. Raises as :meth:`commit`, on all ranks."""
        committed, failure, group = {}, None, self.ownership.group
        try:
            add = meter.add if meter else None
            committed = apply_update(self.committed, payloads, weights, self._optimizer, add)
        except HetnodeError as error:
            failure = error
        group.agree(failure)
        if meter:
            meter.sums = group.totals(meter.sums)
        return committed

    @torch.no_grad()
    def abort(self, local: Mapping[str, Tensor]) -> None:
        """Drop the pending proposal, if any. Anchor, optimizer state and error feedback stay unchanged.

        `local` becomes what it was at the proposal plus the training since :meth:`remember`; without such
        training it stays unchanged.
        """
        pending, self.pending = self.pending, None
        if pending is not None and pending["covered"] is not None:
            covered = pending["covered"]
            for name, start in self._starts(pending["payload"]):
                local[name].copy_(covered[name] + (_float32(local[name]) - start))

    @torch.no_grad()
    def reset(self, local: Mapping[str, Tensor]) -> None:
        """local := anchor and error feedback := 0. Progress that was not sent is lost.

        Use it if the parameters are not finite, or if the error feedback is older than a committed payload
        of this replica: the next proposal would add the content of that payload a second time.
        """
        self.pending = None
        for name, anchor in self.anchor.items():
            copy_into(local[name], anchor)
            self.error[name].zero_()

    def load(self, committed: Mapping[str, Tensor], local: Mapping[str, Tensor]) -> None:
        """Copy the committed state after another round, and :meth:`reset` local to it.

        Names and shapes match the stage. An optimizer state that is not in `committed` becomes 0, as before
        round 1.
        """
        self._take(with_state(committed, self._names, self._optimizer.slots))
        self.reset(local)

    def _take(self, committed: Mapping[str, Tensor]) -> None:
        self.anchor = {name: committed[name] for name in self._names}
        self.optimizer_state = {name: tensor for name, tensor in committed.items() if name not in self.anchor}


def with_state(
    committed: Mapping[str, Tensor], names: Iterable[str], slots: Sequence[str]
) -> dict[str, Tensor]:
    """Copies of the parameters `names` and their optimizer state; state missing in `committed` becomes 0."""
    parameters = _copied({name: committed[name] for name in names})
    initial = initial_state(parameters, slots)
    return parameters | _copied({name: committed.get(name, zero) for name, zero in initial.items()})


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: _float32(tensor).clone() for name, tensor in tensors.items()}


def _float32(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float32)
