"""The decisions of the coordinator as calls to the worker, with what this member has proposed itself."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from node.core.train.services import Services
from node.ipc.stored_payload import StoredPayload
from node.ipc.worker_calls import Abort, Commit, CommitEmbedding, CommitResult, ResetError
from protocol.math.turns import is_due
from protocol.status import PayloadAgreement
from protocol.types import (
    Aborted,
    Committed,
    Decision,
    ExchangeGroup,
    Part,
    PayloadDescriptor,
    Skipped,
    entries_of,
)

log = logging.getLogger(__name__)

_MOST_OMITTED = 2
"""A payload that is in the group of its round, and is left out so often in a row, counts for nothing. What it
held is not kept: payloads would grow from round to round, agree with the others less, and count at last."""


@dataclass(frozen=True)
class OwnPayload:
    """What this member offers in a round of one stage.

    `position` is its place in the coordinator's group; None where it does not know that group.
    """

    descriptor: PayloadDescriptor
    position: int | None = None

    @classmethod
    def in_group(cls, descriptor: PayloadDescriptor, group: ExchangeGroup | None) -> OwnPayload:
        members = () if group is None else group.descriptors
        return cls(descriptor, members.index(descriptor) if descriptor in members else None)


class Commits:
    """Commits and aborts rounds at the worker of one member.

    Attributes:
        pending: by stage, the proposal that waits for its decision.
    """

    def __init__(self, services: Services) -> None:
        self._worker, self._peer, self._spec = services.worker, services.identity.peer, services.spec
        self._compare = services.compare
        self.pending: dict[int, OwnPayload] = {}
        # The round and result of the last commit of each stage, and what was measured of others' payloads.
        self._measured: dict[int, tuple[int, CommitResult, list[PayloadAgreement]]] = {}
        self._omitted: dict[int, int] = {}  # commits in a row without this member's payload, by stage

    def measured_in(self, round_number: int) -> list[tuple[CommitResult, list[PayloadAgreement]]]:
        """Of each stage that was committed in this round last: norms, and what was measured."""
        return [(result, found) for last, result, found in self._measured.values() if last == round_number]

    async def to_stage(
        self,
        decision: Committed,
        outcome: Sequence[StoredPayload],
        gathered: Mapping[PayloadDescriptor, StoredPayload],
    ) -> dict[Part, str]:
        """Commit at the worker. Returns the new digests; stage 0 contains the embedding.

        Args:
            outcome: the payloads of the decision in its order, or the one result of their group.
            gathered: all valid payloads of the exchange; those that do not count are measured, too.
        """
        stage, round_number = decision.stage, decision.round_number
        descriptors = [entry.descriptor for entry in decision.entries]
        proposal = self.pending.get(stage)
        position = None
        if proposal is not None and proposal.descriptor in descriptors:
            is_result = decision.result is not None
            position = proposal.position if is_result else descriptors.index(proposal.descriptor)
        uncounted = [each for each in gathered if each not in descriptors and self._worker.reads_files]
        comparison = None
        if self._compare is not None and decision.result is None:
            comparison = self._compare(decision, uncounted)
        commit = Commit(
            *(stage, round_number, tuple(outcome), _weights(decision), position, comparison),
            uncounted=tuple(gathered[each] for each in uncounted),
        )
        result = await self._worker.call(commit)
        owners = [each.owner for each in (*descriptors, *uncounted)]
        positions = comparison.positions if comparison is not None else ()
        self._measured[stage] = (
            *(round_number, result),
            [
                PayloadAgreement(stage, owners[at], **asdict(figures))
                for at, figures in zip(positions, result.agreements, strict=True)
                if figures is not None
            ],
        )
        self.pending.pop(stage, None)
        # Sent before a restart: the restored error feedback still has what is in the anchor now.
        is_restored = position is None and any(each.owner == self._peer for each in descriptors)
        is_omitted = proposal is not None and position is None and proposal.position is not None
        self._omitted[stage] = self._omitted.get(stage, 0) + 1 if is_omitted else 0
        if self._omitted[stage] >= _MOST_OMITTED:
            log.warning(
                "stage %d: %d payloads in a row counted for nothing, and are dropped", stage, _MOST_OMITTED
            )
        if is_restored or self._omitted[stage] >= _MOST_OMITTED:
            self._omitted[stage] = 0
            await self._worker.call(ResetError(stage))
        digests = {Part.STAGE: result.digest}
        if result.embedding_digest is not None:
            digests[Part.EMBEDDING] = result.embedding_digest
        return digests

    async def abort(self, decision: Aborted | Skipped) -> None:
        """Drop the proposal: the anchor stays."""
        stage, round_number = decision.stage, decision.round_number
        if is_due(self._spec, stage, round_number):
            log.warning("round %d of stage %d was aborted: %s", round_number, stage, decision.reason)
        await self._worker.call(Abort(stage, round_number))
        self.pending.pop(stage, None)

    async def to_embedding(
        self, decision: Committed | Aborted | Skipped, outcome: Sequence[StoredPayload]
    ) -> dict[Part, str]:
        """Commit the embedding without stage 0, which an aborted round leaves as it is."""
        call = CommitEmbedding(decision.round_number, tuple(outcome), _weights(decision))
        return {Part.EMBEDDING: await self._worker.call(call)}


def _weights(decision: Decision) -> tuple[float, ...]:
    """Of the payloads of a decision; none for the result of a group."""
    if isinstance(decision, Committed) and decision.result is not None:
        return ()
    return tuple(entry.descriptor.weight for entry in entries_of(decision))
