"""Which result of a reduction a round commits: the one that most of the group's weight holds.

Every member that has all reduced parts reports the hash of its result, and which members are not in it. Two
members that got other bytes from a reducer report other hashes. What a reducer tells all of them alike is not
visible here.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from coordinator.membership.validation import bad_request, max_payload_bytes
from coordinator.state.commands import Report
from coordinator.state.events import ResultReported
from coordinator.state.lines import uplink_of, with_most_uplink
from coordinator.state.reducers import failed_reducers
from coordinator.state.state import Round, State
from coordinator.state.text import counted, listed, short
from coordinator.state.transaction import Transaction
from protocol.types import CommittedResult, ExchangeGroup, ManifestEntry, PeerId, ResultClaim

MAX_RESULT_HOLDERS = 16
"""Most holders of a result in a decision."""


@dataclass(frozen=True)
class Agreement:
    """What a group has agreed on: no result where too few hold the same one. `reason` is a sentence."""

    result: CommittedResult | None
    entries: tuple[ManifestEntry, ...]
    reason: str


def check_result(state: State, command: Report) -> None:
    """Raises BAD_REQUEST for a claim that does not fit the group, or in a run that gathers."""
    claim = command.result
    if claim is None:
        return
    members = state.round_of(command.stage, command.round_number).members
    if state.spec.outer.exchange != "reduced":
        raise bad_request(f"{command.peer} reports a result in a run that does not reduce")
    if command.peer not in members or not {*claim.without} < members:
        raise bad_request(f"the result of {command.peer} is not one of this group")
    if claim.nbytes > (most := max_payload_bytes(state.spec)):
        raise bad_request(f"the result of {command.peer} has {claim.nbytes} bytes, at most {most}")


def record_result(transaction: Transaction, command: Report) -> None:
    """Record the result that a member reports first; it cannot take that back."""
    claim, key = command.result, (command.stage, command.round_number)
    if claim is not None and command.peer not in transaction.state.round_of(*key).results:
        transaction.add(ResultReported(transaction.now, *key, command.peer, claim))


def agree(state: State, round_state: Round, group: ExchangeGroup) -> Agreement:
    """The result that live members with more than half of the group's weight hold, and at least two members.

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
        reason += (
            f"; {listed([short(peer) for peer in sorted(failed)])} will reduce nothing in the next rounds"
        )
    return Agreement(None, (), reason)


def _agreed(state: State, group: ExchangeGroup, claim: ResultClaim, peers: list[PeerId]) -> Agreement:
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
    return Agreement(CommittedResult(claim.sha256, claim.nbytes, tuple(sorted(fastest))), entries, reason)
