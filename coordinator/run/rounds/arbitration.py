"""Arbitration: the coordinator's own peer fetches the payloads that too few peers report as held.

Reports alone cannot show who is wrong: a peer that says "I do not hold it" may lie, or its owner may send it
nothing. Half of the replicas could so leave out the payloads of the others in every round. A contested
payload that the arbiter gets and can decode counts, because every peer can fetch it from the arbiter.

The contest fixes what counts without the arbiter: later reports take nothing away from a round.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from coordinator.membership.strikes import LEAST_ACCUSERS, accusers_of, judge_verdict
from coordinator.run.state.commands import Arbitrate
from coordinator.run.state.events import PayloadArbitrated, PayloadsContested
from coordinator.run.state.records import Round
from coordinator.run.state.state import State
from coordinator.run.state.transaction import Transaction
from protocol.types import ExchangeGroup, Finding, PayloadDescriptor, PeerId

MOST_PAYLOADS = 32
"""Payloads of one (stage, round) that the arbiter is asked for at most. It serves every lacking peer, too."""
MOST_BYTES = 256 << 20
"""Of these payloads together."""
UNFOUND_ROUNDS = 10
"""Rounds in which the arbiter is not asked for payloads of an owner after one that it could not fetch.

Each such payload costs a round up to the time to gather, so a liar can delay at most every tenth round.
"""


@dataclass(frozen=True)
class Holdings:
    """What the live peers report about the payloads of one (stage, round).

    Attributes:
        holders: by owner, the peers that report holding its payload, in the order of their ids.
        reporters: the number of peers that have reported.
        least: the least number of peers that must hold a payload.
    """

    holders: Mapping[PeerId, Sequence[PeerId]]
    reporters: int
    least: int

    def of(self, owner: PeerId) -> Sequence[PeerId]:
        return self.holders.get(owner, ())

    def are_enough(self, owner: PeerId) -> bool:
        """Whether `least` peers, and more than half of the reporters, hold the payload of `owner`."""
        # With `least` alone, two liars could commit a payload that no other peer can fetch.
        holding = len(self.of(owner))
        return holding >= self.least and 2 * holding > self.reporters


def holdings_of(state: State, round_state: Round) -> Holdings:
    holders: defaultdict[PeerId, list[PeerId]] = defaultdict(list)
    live = [
        (peer, owners) for peer, owners in sorted(round_state.reports.items()) if state.peers[peer].is_live
    ]
    for peer, owners in live:
        for owner in owners:
            holders[owner].append(peer)
    # A single replica has no second holder.
    least = max(1, min(2, sum(map(state.has_weight, state.complete_replicas(state.current_round)))))
    return Holdings(holders, len(live), least)


def counts(round_state: Round, holdings: Holdings, owner: PeerId) -> bool:
    """Whether the payload of `owner` is to be committed, by the reports or by the verdict of the arbiter."""
    contest = round_state.contest
    if contest is None:
        return holdings.are_enough(owner)
    if owner in contest.verdicts and contest.verdicts[owner].finding is not Finding.NOT_FOUND:
        return contest.verdicts[owner].finding is Finding.HELD
    if owner in contest.owners or owner in contest.left_out:
        return holdings.are_enough(owner)  # more peers may hold it by now
    return bool(holdings.of(owner))  # it was held by enough peers before


def is_held_by_arbiter(round_state: Round, owner: PeerId) -> bool:
    verdict = round_state.contest.verdicts.get(owner) if round_state.contest else None
    return verdict is not None and verdict.finding is Finding.HELD


def awaits_arbiter(transaction: Transaction, stage: int, round_state: Round, group: ExchangeGroup) -> bool:
    """Whether the decision that is due waits for the arbiter. Asks it once, when the reports are in."""
    state = transaction.state
    contest = round_state.contest
    if contest is not None:
        # After a restart the arbiter gets the whole time again.
        waits_since = max(contest.at, state.started_at)
        return bool(contest.open_owners) and transaction.now - waits_since < contest.seconds
    if state.arbiter is None:
        return False
    holdings = holdings_of(state, round_state)
    doubtful = [d for d in group.descriptors if not holdings.are_enough(d.owner)]
    owners = _within_bounds([d for d in doubtful if _is_contested(state, round_state, holdings, d)])
    if not owners:
        return False
    left_out = tuple(d.owner for d in doubtful if d.owner not in owners)
    key = stage, state.current_round
    transaction.add(PayloadsContested(transaction.now, *key, owners, left_out, group.seconds))
    return True


def note_verdict(transaction: Transaction, command: Arbitrate) -> None:
    """Record the verdict about a contested payload once, and give the strikes that follow from it."""
    stage, round_number, owner = command.stage, command.round_number, command.owner
    round_state = transaction.state.round_of(stage, round_number)
    is_decided = transaction.state.is_decided(stage, round_number)
    if is_decided or round_state.contest is None or owner not in round_state.contest.open_owners:
        return
    transaction.add(PayloadArbitrated(transaction.now, stage, round_number, owner, command.verdict))
    claimants = holdings_of(transaction.state, round_state).of(owner)
    judge_verdict(transaction, round_number, owner, command.verdict, claimants)


def _is_contested(
    state: State, round_state: Round, holdings: Holdings, descriptor: PayloadDescriptor
) -> bool:
    """Whether the arbiter should fetch a payload that too few peers report as held."""
    owner = descriptor.owner
    accusers, witnesses = accusers_of(round_state, owner)
    # Half of the replicas cannot be more than two thirds of the witnesses from four replicas on.
    is_condemned = len(accusers) >= LEAST_ACCUSERS and 3 * len(accusers) > 2 * len(witnesses)
    unfound = state.unfound.get(owner)
    is_trusted = unfound is None or descriptor.round_number > unfound + UNFOUND_ROUNDS
    has_donor = state.peers[owner].is_live or bool(holdings.of(owner))
    return not is_condemned and is_trusted and has_donor


def _within_bounds(descriptors: list[PayloadDescriptor]) -> tuple[PeerId, ...]:
    """The owners of the first payloads that fit MOST_PAYLOADS and MOST_BYTES."""
    owners: list[PeerId] = []
    nbytes = 0
    # Smaller payloads first: one false length must not use up the bound of the others.
    for descriptor in sorted(descriptors, key=lambda each: (each.nbytes, each.owner)):
        nbytes += descriptor.nbytes
        if len(owners) == MOST_PAYLOADS or nbytes > MOST_BYTES:
            break
        owners.append(descriptor.owner)
    return tuple(sorted(owners))
