"""How a member reports the payloads of its groups in few bytes, and reads the answers."""

from __future__ import annotations

from collections.abc import Sequence

from protocol.errors import faulty_peer
from protocol.pb import hetnode_pb2 as pb
from protocol.types import Committed, Decision, ExchangeGroup, ManifestEntry, PayloadDescriptor, PeerId
from protocol.wire.convert.payloads import decision_from_pb, group_from_pb
from protocol.wire.groups import at_positions, group_digest, positions_of, unpack


class GroupReports:
    """The newest group of each stage that `peer` has from a coordinator that reads positions."""

    def __init__(self, peer: PeerId) -> None:
        self._peer = peer
        self._groups: dict[int, tuple[int, ExchangeGroup]] = {}

    @staticmethod
    def group_of(reply: pb.MatchReply) -> ExchangeGroup:
        """Raises HetnodeError BAD_REQUEST."""
        return group_from_pb(unpack(pb.MatchReply, reply.packed) if reply.packed else reply)

    def note(self, own: PayloadDescriptor, group: ExchangeGroup | None) -> None:
        """Keep the group that was matched for `own`; None: the coordinator does not read positions."""
        self._groups.pop(own.stage, None)
        if group is not None:
            self._groups[own.stage] = own.round_number, group

    def by_positions(
        self, report: pb.ReportRequest, held: Sequence[PayloadDescriptor]
    ) -> pb.ReportRequest | None:
        """`report` with `held` as positions in the group of its round; None if that is not possible."""
        round_number, group = self._groups.get(report.stage, (0, None))
        if group is None or round_number != report.round:
            return None
        positions = positions_of(group.descriptors, held)
        if positions is None:
            return None
        named = pb.ReportRequest(group=group_digest(group.descriptors), positions=positions)
        named.MergeFrom(report)
        return named

    def decision_of(self, reply: pb.DecisionReply, stage: int, round_number: int) -> Decision:
        """The decision on a (stage, round). Raises HetnodeError BAD_REQUEST.

        Where the answer has positions, this peer holds all payloads that count, and is their only known
        holder.
        """
        if not reply.counted:
            return decision_from_pb(unpack(pb.DecisionReply, reply.packed) if reply.packed else reply)
        # Everything but the payloads is read as in the decision of a round without any.
        rest = decision_from_pb(
            pb.DecisionReply(
                stage=reply.stage, round=reply.round, next_epoch=reply.next_epoch, reason=reply.reason
            )
        )
        of_round, group = self._groups.get(stage, (0, None))
        if group is None or not of_round == round_number == rest.round_number or rest.stage != stage:
            raise faulty_peer(f"A decision names positions in a group that {self._peer} does not have.")
        counted = at_positions(group.descriptors, reply.counted)
        entries = tuple(ManifestEntry(each, (self._peer,)) for each in counted)
        if not entries:
            return rest
        return Committed(stage, round_number, rest.next_epoch, rest.reason, entries)
