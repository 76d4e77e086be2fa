"""What a round waits for, what members report as held, and whether enough of the replicas contribute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from coordinator.run.state.commands import Report
from coordinator.run.state.events import HoldingsReported, ResultReported
from coordinator.run.state.records import Round
from coordinator.run.state.state import State
from coordinator.run.state.transaction import Transaction
from protocol.types import ExchangeGroup, ManifestEntry, PeerId

MOST_REPORTS = 8
"""Reports of a peer on one (stage, round) that are stored; each holds more payloads than the one before."""
_ROUNDING = 1e-6
"""Sums of weights are rounded."""


def missing_offers(state: State, stage: int, round_number: int) -> list[int]:
    """The indices of the complete replicas that have neither offered nor withheld a payload yet."""
    round_state = state.round_of(stage, round_number)
    answered = {*round_state.offers, *round_state.withheld}
    replicas = state.complete_replicas(round_number)
    return [replica.index for replica in replicas if replica.host_of(stage).peer not in answered]


def missing_reports(state: State, round_state: Round) -> list[PeerId]:
    """The members of the group that have not reported yet, and that are live and may still do so."""
    return list(_missing_reports(state, round_state))


def _missing_reports(state: State, round_state: Round) -> Iterator[PeerId]:
    members = round_state.group.descriptors if round_state.group else ()
    unreported = (d for d in members if d.owner not in round_state.reports)
    return (
        d.owner
        for d in unreported
        if state.may_offer(d.owner, d.round_number)
        and state.peers[d.owner].is_live
        and not state.is_unproven(d.owner)
    )


def all_have_reported(state: State, round_state: Round) -> bool:
    """Whether :func:`missing_reports` is empty; each report asks this."""
    return next(_missing_reports(state, round_state), None) is None


def all_have_answered(state: State, stage: int, round_number: int) -> bool:
    """Whether each complete replica has offered or withheld a payload of `stage`, and at least one has."""
    round_state, plan = state.round_of(stage, round_number), state.plan_for(round_number)
    # A cheap check first: this runs for each offer, and the other check visits all replicas.
    answers = len(round_state.offers) + len(round_state.withheld)
    without = len(state.absent.get(plan.epoch, ())) + len(state.failed_links)
    enough = answers > 0 and answers + without >= len(plan.replicas)
    return enough and not missing_offers(state, stage, round_number)


def record_holdings(transaction: Transaction, command: Report) -> None:
    """Record which of the offered payloads the sender holds, and its result, unless it has told that before.

    A peer may report again when it has more payloads. It cannot take a report or a result back.
    """
    sender, key, claim = command.peer, (command.stage, command.round_number), command.result
    round_state = transaction.state.round_of(*key)
    if claim is not None and sender not in round_state.results:
        transaction.add(ResultReported(transaction.now, *key, sender, claim))
    offers, before = round_state.offers, round_state.reports.get(sender)
    # Most are the very records of the group: two records are only compared where they are not one.
    offered = {d.owner for d in command.held if (known := offers.get(d.owner)) is d or known == d}
    owners = (before or frozenset()) | offered
    if owners == before or round_state.report_counts.get(sender, 0) >= MOST_REPORTS:
        return
    lacking = round_state.members - owners
    where = transaction.now, *key, sender
    # The exceptions alone: all reports of a round together would grow with the square of the swarm.
    if owners <= round_state.members and len(lacking) < len(owners):
        of_group = len(round_state.members)
        transaction.add(HoldingsReported(*where, (), of_group, tuple(sorted(lacking))))
    else:
        transaction.add(HoldingsReported(*where, tuple(sorted(owners))))


def lacks_weight(state: State, stage: int, group: ExchangeGroup, entries: Sequence[ManifestEntry]) -> str:
    """Why replicas that weigh so little cannot decide the round; "" if they can.

    They need more than half of what the plan assigns to the replicas that could have contributed. Half is
    enough if others have offered, and their payloads cannot count: of two replicas, one may send rubbish.

    A replica counts with its whole weight even if it has done a part of its phase: a slow one is present.
    Replicas that lack a member, withhold or have bad scores do not count, or nothing could be committed
    without them.
    """
    round_number = state.current_round
    owners = {entry.descriptor.owner for entry in entries}
    offering = {descriptor.owner for descriptor in group.descriptors}
    live = {replica.index for replica in state.complete_replicas(round_number)}
    withheld, weight, offered, live_weight = state.round_of(stage, round_number).withheld, 0.0, 0.0, 0.0
    for replica in state.plan_for(round_number).replicas:
        host = replica.host_of(stage).peer
        if state.is_weightless(host, round_number):
            continue
        weight += (host in owners) * replica.weight
        offered += (host in offering) * replica.weight
        could_contribute = host in offering or (replica.index in live and host not in withheld)
        live_weight += could_contribute * replica.weight
    half = live_weight / 2
    if weight > half + _ROUNDING or (weight > half - _ROUNDING and offered > half + _ROUNDING):
        return ""
    return f"replicas that weigh {weight:g} of {live_weight:g} contribute, and more than half must"
