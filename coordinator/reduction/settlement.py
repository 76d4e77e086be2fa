"""Which result of a reduction a round commits: the one that most of the group's weight holds.

Every member that has all reduced parts reports the hash of its result, and which members are not in it. Two
members that got other bytes from a reducer report other hashes. What a reducer tells all of them alike is not
visible here.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from coordinator.base.phrases import counted, listed, short
from coordinator.membership.validation import max_payload_bytes
from coordinator.reduction.reducers import Bench, failed_reducers, is_benched, with_benches
from coordinator.run.state.commands import Report
from coordinator.run.state.lines import uplink_of, with_most_uplink
from coordinator.run.state.records import Round
from coordinator.run.state.settlement import SettledResult, Settlement
from coordinator.run.state.state import State
from protocol.types import (
    Committed,
    CommittedResult,
    Decision,
    ExchangeGroup,
    ManifestEntry,
    MemberLine,
    PayloadDescriptor,
    PeerId,
    ResultClaim,
    RolledBack,
)

MAX_RESULT_HOLDERS = 16
"""Most holders of a result in a decision."""


class ReducedSettlement(Settlement):
    """Members reduce the payloads of a group in parts, and agree on one result.

    `State.settlement_notes` has the bench of each member that reduced nothing for some rounds.
    """

    def lines(
        self, state: State, descriptors: Sequence[PayloadDescriptor], lines: Sequence[MemberLine]
    ) -> tuple[MemberLine, ...]:
        """All lines, whatever is known of their uplinks. Only members that may reduce are told as open."""
        able = [
            replace(line, is_open=line.is_open and not is_benched(state.settlement_notes, descriptor))
            for descriptor, line in zip(descriptors, lines, strict=True)
        ]
        # One alone would have no checker.
        is_enough = sum(line.is_open for line in able) >= min(2, sum(line.is_open for line in lines))
        return tuple(able if is_enough else lines)

    def work(self, nbytes: int) -> int:
        """The same for any number of payloads: the traffic of a member does not grow with them."""
        return 1

    def fault_of(self, state: State, report: Report) -> str:
        claim = report.result
        if claim is None:
            return ""
        members = state.round_of(report.stage, report.round_number).members
        if report.peer not in members or not {*claim.without} < members:
            return f"the result of {report.peer} is not one of this group"
        if claim.nbytes > (most := max_payload_bytes(state.spec)):
            return f"the result of {report.peer} has {claim.nbytes} bytes, at most {most}"
        return ""

    def agreement(self, state: State, round_state: Round, group: ExchangeGroup) -> SettledResult:
        """The result that live members with more than half of the group's weight hold, and two members.

        A single member needs no second one. Members that have died, or have no result, count against it: less
        than half of the weight never decides what the others apply.
        """
        weights = {descriptor.owner: descriptor.weight for descriptor in group.descriptors}
        holders: defaultdict[ResultClaim, list[PeerId]] = defaultdict(list)
        for peer, claim in sorted(round_state.results.items()):
            if state.peers[peer].is_live:
                holders[claim].append(peer)
        for claim, peers in holders.items():
            weight = math.fsum(weights[peer] for peer in peers)
            if 2 * weight > math.fsum(weights.values()) and len(peers) >= min(2, len(weights)):
                return _agreed(state, group, claim, peers)
        found = f"{counted(len(holders), 'result')} among {counted(len(weights), 'member')}"
        reason = f"{found}, and none is held by more than half of the weight"
        if failed := failed_reducers(round_state):
            names = listed([short(peer) for peer in sorted(failed)])
            reason += f"; {names} will reduce nothing in the next rounds"
        return SettledResult(None, (), reason)

    def after(self, state: State, decision: Decision) -> Mapping[PeerId, Bench]:
        if isinstance(decision, Committed | RolledBack):
            return state.settlement_notes
        failed = failed_reducers(state.round_of(decision.stage, decision.round_number))
        return with_benches(state.settlement_notes, decision.round_number, failed)


def _agreed(state: State, group: ExchangeGroup, claim: ResultClaim, peers: list[PeerId]) -> SettledResult:
    fastest = with_most_uplink({peer: uplink_of(state, peer) for peer in peers})[:MAX_RESULT_HOLDERS]
    # The payloads are in the result, and nobody needs them any more: only their owners hold them.
    entries = tuple(
        ManifestEntry(descriptor, (descriptor.owner,))
        for descriptor in group.descriptors
        if descriptor.owner not in claim.without
    )
    reason = f"{len(peers)} of {counted(len(group.descriptors), 'member')} hold the same result"
    if claim.without:
        reason += f", without {counted(len(claim.without), 'payload')}"
    return SettledResult(CommittedResult(claim.sha256, claim.nbytes, tuple(sorted(fastest))), entries, reason)
