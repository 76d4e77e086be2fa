"""What a member of a round reports as held, as it is recorded."""

from __future__ import annotations

from coordinator.run.state.commands import Report
from coordinator.run.state.events import HoldingsReported, ResultReported
from coordinator.run.state.transaction import Transaction

MOST_REPORTS = 8
"""Reports of a peer on one (stage, round) that are stored; each holds more payloads than the one before."""


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
