"""Live peers that answer in no round lose their assignments."""

from __future__ import annotations

from coordinator.run.state.events import PeerRetreated
from coordinator.run.state.transaction import Transaction

MOST_SILENT_ROUNDS = 3
"""Rounds in a row without an answer after which a live peer may lose its assignment."""


def remove_silent(transaction: Transaction) -> None:
    """Take the assignment from each live peer that has not answered in any of the last rounds.

    If it had half of the weight, nothing could be committed again. A node may need as long as the spec allows
    to open its links, and rounds may be shorter, so it must have been silent for as long, too.
    """
    state, timing = transaction.state, transaction.state.spec.timing
    turns = state.spec.outer.turns
    round_number, epoch = state.current_round, state.plan_for(state.current_round).epoch
    for peer, silence in sorted(state.silences.items()):
        is_long = transaction.now - silence.since >= timing.link + timing.match_window
        is_silent = silence.rounds >= MOST_SILENT_ROUNDS and silence.last >= round_number - turns
        if is_silent and is_long and state.takes_part(peer, round_number):
            reason = f"it has answered in none of the last {silence.rounds} rounds"
            transaction.add(PeerRetreated(transaction.now, peer, epoch, reason))
