"""SparseLoCo for one stage as a transaction: propose, then commit or abort (eqs 1 and 2 of the paper).

The anchor is the last committed value of the parameters, equal in every bit on all replicas.

    propose   e' = beta e + (anchor - local)              what was learned here and is not sent yet
              payload = Q(top-k(e' / a)),  e'' = e' - a payload     a: share of the H steps that were trained
    commit    anchor' = step(anchor, sum_m w_m payload_m / sum_m w_m), or a radial merge
              e = e'', local = anchor'                     if the payload of this replica is in the sum
              local = local + anchor' - anchor             if not: the next proposal has this progress
    abort     nothing changes

Anchor and error feedback change only when a round is committed, so an aborted round loses nothing. With
momentum the same rules hold (protocol.math.outer_optimizer): the optimizer takes one step per committed
round. Error feedback counts what was sent in the pseudo-gradient, not what the optimizer makes of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol, TypedDict

import torch
from torch import Tensor

from node.core.model.shapes import payload_layout
from node.core.model.transfer import copy_into, to_device
from node.core.optimizer.outcome import Outcome, contents_of, left_out
from node.core.optimizer.received import ReceivedPayloads
from node.ipc.stored_payload import Payload
from node.ipc.worker_calls import MeasuredAgreement
from node.ranks.ownership import Ownership
from protocol.codec.payload import encode_tensor
from protocol.errors import ErrorCode, HetnodeError
from protocol.math.clipping import SentTensor, outliers, payload_norm
from protocol.math.outer_optimizer import committed_shapes, initial_state, state_name
from protocol.math.outer_step import apply_update
from protocol.math.output_subspace import exactly_projected, output_basis
from protocol.math.topk import sparsify_blocks
from protocol.spec.run import RunSpec


class PendingPayload(TypedDict):
    """A payload, the share of its values that is learned, and the error feedback if all of it is applied."""

    payload: bytes
    share: float
    error: dict[str, Tensor]


class CommitProbe(Protocol):
    """Measures the payloads of a round while they are committed, without changing the result.

    Attributes:
        uncounted: payloads of the round that have no weight; they are measured, too.
    """

    uncounted: Sequence[Payload]

    def begin(
        self, payloads: Sequence[Mapping[str, SentTensor]], weights: Sequence[float]
    ) -> Callable[[str, Tensor], None]:
        """A function to call with the name and the weighted sum of each parameter, flat."""

    def results(self) -> Sequence[MeasuredAgreement | None]:
        """The figures after the commit; None where one is not finite, or was not measured."""


class OuterStage:
    """Anchor, optimizer state and error feedback of one stage, and at most one pending proposal.

    `parameters` are the committed ones before round 1; they are copied. All other state starts at 0.
    `ownership` composes the ranks of a peer: each rank has in `parameters` and `local` those that the rank
    owns, and all ranks call `digest`, `propose` and `commit` together, in the same order.

    Attributes:
        layout: the form of the payloads.
        anchor: float32 CPU tensors by canonical name. A commit replaces the tensors and never changes one in
            place, so replicas in one process may share them.
        optimizer_state: state of the outer optimizer, named by outer_optimizer.state_name. Also replaced,
            never changed in place.
        error: error feedback e, by canonical name.
        pending: the proposal of the round that is not decided yet.
        received: the payloads of this round, decoded once.
        progress_norm, error_norm: L2 norms |anchor - local| and |beta e| of the two parts of the last
            proposal, before compression; each with a relative error below 1e-5.
    """

    def __init__(
        self,
        spec: RunSpec,
        stage: int,
        parameters: Mapping[str, Tensor],
        ownership: Ownership = Ownership(),  # noqa: B008  frozen
    ) -> None:
        self.layout, self.ownership = payload_layout(spec, stage), ownership
        self._outer = spec.outer
        self._names = [name for name in self.layout.shapes if ownership.is_mine(name)]
        self.anchor = {name: as_float32(parameters[name]).clone() for name in self._names}
        self.optimizer_state = initial_state(self.anchor, self._outer.slots)
        self.error = {name: torch.zeros_like(tensor) for name, tensor in self.anchor.items()}
        self._basis_dk = output_basis(spec, stage)
        self.pending: PendingPayload | None = None
        self.received = ReceivedPayloads(self.layout)
        self.progress_norm = self.error_norm = 0.0

    @property
    def committed(self) -> dict[str, Tensor]:
        """The state that is equal on all replicas, by name: the anchor and optimizer state kept here."""
        return self.anchor | self.optimizer_state

    @property
    def committed_shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the committed tensors of all ranks."""
        return committed_shapes(self.layout.shapes, self._outer)

    def digest(self) -> str:
        """Digest of the :attr:`committed` of all ranks, equal after equal rounds. "" except on rank 0."""
        return self.ownership.digest(self.committed_shapes, self.committed)

    @torch.no_grad()
    def propose(self, local: Mapping[str, Tensor], share: float = 1.0) -> bytes | None:
        """The payload with this replica's contribution to the round. It is pending until commit or abort.

        After a `share` of the inner phase the payload is what a whole one would have learned: its weight has
        that share, too, and a mean of unlike lengths would move the anchor less than the steps behind it.

        None if a parameter or its error feedback is not finite. Then nothing is pending, and the replica
        takes part in the round without a contribution. :meth:`reset` restarts it from the anchor.

        Memory: the pending error feedback (one copy of the stage) and the payload (up to another copy if all
        values are sent). An older proposal that is still pending is dropped: its caller failed before it sent
        the payload. `local` are the parameters after the inner phase, on any device.
        """
        self.pending = None
        parts, error, squares = {}, {}, [0.0, 0.0]
        try:
            for name in self._names:
                layout = self.layout.tensors[name]
                error[name] = torch.empty_like(self.anchor[name])
                learned = self._learned(name, local[name], error[name], squares)
                sparse = sparsify_blocks((each if share == 1.0 else each / share for each in learned), layout)
                # e'' = e' - sent, with the decoded values: error feedback also keeps the quantization error.
                sparse.add_to(error[name].view(-1), -share)
                parts[name] = encode_tensor(layout, sparse)
        except FloatingPointError:
            parts = {}
        payload = self.ownership.join(self.layout, parts)
        if payload is not None:
            self.progress_norm, self.error_norm = map(math.sqrt, self.ownership.group.totals(squares))
            self.pending = {"payload": payload, "share": share, "error": error}
            self.received.expect(payload)
        return payload

    def _learned(self, name: str, local: Tensor, kept: Tensor, squares: list[float]) -> Iterator[Tensor]:
        """Yield e' = beta e + (anchor - local) (eq. 1) in blocks on the device of `local`.

        Also writes e' to `kept`, which is on the CPU, and adds the squares of both parts to `squares`. Raises
        FloatingPointError if a value is not finite.
        """
        local, device = local.detach().reshape(-1), local.device
        anchor, error, kept = self.anchor[name].view(-1), self.error[name].view(-1), kept.view(-1)
        for block in self.layout.tensors[name].blocks():
            run = slice(block.start, block.stop)
            # On the CPU the block is computed directly in `kept`, which saves one copy.
            in_place = kept[run] if device == kept.device else None
            learned = torch.sub(to_device(anchor[run], device), local[run], out=in_place)
            sent_later = to_device(error[run], device)
            squares[0] += float(learned.dot(learned))
            squares[1] += float(sent_later.dot(sent_later)) * self._outer.error_decay**2
            learned.add_(sent_later, alpha=self._outer.error_decay)
            # The sum is a cheap first test. Finite values can overflow it, so then test each element.
            if not math.isfinite(learned.sum()) and not learned.isfinite().all():
                raise FloatingPointError(name)
            if in_place is None:
                kept[run] = learned
            yield learned

    def screen(self, payloads: Sequence[Payload]) -> list[str]:
        """For each gathered payload of one round: the reason to reject it, or "" to accept.

        The norms of the decodable payloads are compared with each other, so pass all gathered payloads,
        including the one of this replica. What is decoded is kept for the commit.

        Raises HetnodeError PAYLOAD_UNAVAILABLE for a file that is lost, which is no fault of a sender.
        """
        problems, norms = [""] * len(payloads), {}
        for position, payload in enumerate(payloads):
            try:
                norms[position] = payload_norm(self.received.decoded(payload))
            except HetnodeError as error:
                if error.code is not ErrorCode.PAYLOAD_CORRUPT:
                    raise
                problems[position] = error.cause
        for position, problem in zip(norms, outliers(list(norms.values())), strict=True):
            problems[position] = problem
        return problems

    @torch.no_grad()
    def commit(
        self,
        outcome: Outcome,
        mine_included: bool,
        local: Mapping[str, Tensor],
        probe: CommitProbe | None = None,
    ) -> None:
        """Apply exactly this outcome to the anchor (eq. 2) and update the local parameters in place.

        Args:
            outcome: the payloads of the manifest in its order, or the one result of their group.
            mine_included: whether the pending proposal is part of the outcome. If true, error feedback
                becomes that of the proposal plus the part that clipping removed or a result lacks. If false,
                the proposal is dropped, and `local` moves by the same amount as the anchor.
            local: the parameters as they were at the proposal.

        Raises:
            HetnodeError: PAYLOAD_CORRUPT, PAYLOAD_UNAVAILABLE; nothing has changed and the proposal is still
                pending.
        """
        pending = self.pending if mine_included else None
        assert pending is not None or not mine_included, "the round includes a payload not proposed here"
        # Everything that can fail comes first; only then the state changes.
        contents, weights = contents_of(self.received, outcome)

        def moved() -> dict[str, Tensor]:
            observe = None
            # What does not count is measured only if that cannot fail: the commit does not depend on it.
            if probe is not None and all(map(self.received.holds, probe.uncounted)):
                uncounted = [self.received.decoded(payload) for payload in probe.uncounted]
                observe = probe.begin([*contents, *uncounted], weights)
            found = apply_update(self.committed, contents, weights, self._outer, observe)
            return exactly_projected(found, self._basis_dk)

        committed = self.ownership.group.agreed(moved)
        for name, anchor in self.anchor.items():
            if pending is not None:
                copy_into(local[name], committed[name])
            else:
                # anchor - local stays the same, so the next proposal still contains this progress.
                local[name].add_((committed[name] - anchor).to(local[name].device))
        self.take(committed)
        if pending is not None:
            self.error = pending["error"]
            unsent, part = left_out(self.layout, outcome, pending["payload"], contents, self._outer.clip)
            for name, rest in unsent.items() if part > 0.0 else ():
                if name in self.error:  # this rank's
                    rest.add_to(self.error[name].view(-1), part * pending["share"])
        self.abort()

    def abort(self) -> None:
        """Drop the pending proposal, if any: the state stays, and the next proposal has its progress too."""
        self.pending = None
        self.received.clear()

    @torch.no_grad()
    def estimate(self) -> Iterable[tuple[str, Tensor]]:
        """Name and value of the parameters after a round of this replica's pending payload alone.

        They are computed when they are read, from the state at the call of this method.
        """
        assert self.pending is not None, "an estimate is that of a proposal"
        sent = self.received.decoded(self.pending["payload"])
        anchor, slots = self.anchor, self.optimizer_state

        def moved(name: str) -> Tensor:
            state = {each: slots[each] for each in (state_name(name, slot) for slot in self._outer.slots)}
            local = apply_update({name: anchor[name]} | state, [sent], [1.0], self._outer)[name]
            return exactly_projected({name: local}, self._basis_dk)[name]

        return ((name, moved(name)) for name in anchor)

    @torch.no_grad()
    def reset(self, local: Mapping[str, Tensor]) -> None:
        """local := anchor and error feedback := 0. Progress that was not sent is lost.

        Use it if the parameters are not finite, or if the error feedback is older than a committed payload
        of this replica: the next proposal would add the content of that payload a second time.
        """
        self.abort()
        for name, anchor in self.anchor.items():
            copy_into(local[name], anchor)
            self.error[name].zero_()

    def load(self, committed: Mapping[str, Tensor], local: Mapping[str, Tensor]) -> None:
        """Copy the committed state after another round, and :meth:`reset` local to it.

        Names and shapes match the stage. An optimizer state that is not in `committed` becomes 0, as before
        round 1. After an error of a tensor that cannot be read, the stage is a mixture.
        """
        for name in self._names:  # one by one: there may be no memory for a second copy of the stage
            self.take(self.committed | with_state(committed, [name], self._outer.slots))
        self.reset(local)

    def load_error(self, error: Mapping[str, Tensor]) -> None:
        """Copy error feedback, by canonical name. Nothing is pending afterwards."""
        self.abort()
        for name, kept in self.error.items():
            kept.copy_(error[name].detach())

    def take(self, committed: Mapping[str, Tensor]) -> None:
        """Hold the tensors of `committed`, as :attr:`committed` has them, without a copy."""
        self.anchor = {name: committed[name] for name in self._names}
        self.optimizer_state = {name: tensor for name, tensor in committed.items() if name not in self.anchor}


def with_state(
    committed: Mapping[str, Tensor], names: Iterable[str], slots: Sequence[str]
) -> dict[str, Tensor]:
    """Copies of the parameters `names` and their optimizer state; state missing in `committed` becomes 0."""
    parameters = copied({name: committed[name] for name in names})
    initial = initial_state(parameters, slots)
    return parameters | copied({name: committed.get(name, zero) for name, zero in initial.items()})


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies as float32 on the CPU. What is read from elsewhere is a copy already."""
    return {name: as_float32(tensor, isinstance(tensor, Tensor)) for name, tensor in tensors.items()}


def as_float32(tensor: Tensor, copy: bool = False) -> Tensor:
    """`tensor` as float32 on the CPU, a copy only where that is needed, or always."""
    return tensor.detach().to("cpu", torch.float32, copy=copy)
