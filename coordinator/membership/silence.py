"""Live peers that do not answer lose their assignments, and pipelines that deliver nothing are parted."""

from __future__ import annotations

from itertools import pairwise

from coordinator.run.state.events import LinkFailed, PeerRetreated
from coordinator.run.state.records import RECENT_ROUNDS
from coordinator.run.state.transaction import Transaction
from protocol.types import PeerId, Replica

MOST_SILENT_ROUNDS = 3
"""Rounds in a row without an answer after which a live peer may lose its assignment."""
MOST_WITHHELD_ROUNDS = 3
"""Rounds in a row without a payload after which a pipeline is parted. One may be the pause of a machine, and
in the second the replica still has the share of the work that was too much in the first."""
_MOST_WITHHELD_OF_RECENT = RECENT_ROUNDS // 2
"""A pipeline that delivers in fewer than half of its last rounds is parted, too."""


def remove_silent(transaction: Transaction) -> None:
    """Take the assignment from each live peer that has not answered lately: never, or too seldom.

    If it had half of the weight, nothing could be committed again. A node may need as long as the spec allows
    to open its links, and rounds may be shorter, so one that never answers must have been silent for as long,
    too. One that has trained before, and is silent again and again, has its links open: it rests.

    Where all members of a pipeline are silent, one of them may keep the others from training: they are
    parted, as in :func:`part_barren`.
    """
    state, timing = transaction.state, transaction.state.spec.timing
    turns = state.spec.outer.turns
    round_number, epoch = state.current_round, state.plan_for(state.current_round).epoch
    silent = list[PeerId]()
    for peer, silence in sorted(state.silences.items()):
        is_long = transaction.now - silence.since >= timing.link + timing.match_window
        is_recent = silence.last >= round_number - turns and state.takes_part(peer, round_number)
        if is_recent and silence.rounds >= MOST_SILENT_ROUNDS and is_long:
            reason = f"it has answered in none of the last {silence.rounds} rounds"
        elif is_recent and silence.is_frequent:
            answered = RECENT_ROUNDS - silence.recent.bit_count()
            reason = f"it has answered in {answered} of its last {RECENT_ROUNDS} rounds"
        else:
            continue
        transaction.add(PeerRetreated(transaction.now, peer, epoch, reason))
        silent.append(peer)
    for replica in state.complete_replicas(round_number) if silent else ():
        if all(member.peer in silent for member in replica.members):
            silences = [state.silences[member.peer] for member in replica.members]
            delivered = min(max(0, each.last - each.rounds) for each in silences)  # the round before
            _part(transaction, replica, delivered)


def part_barren(transaction: Transaction) -> None:
    """Part the members of each pipeline that withholds its payloads: the next plans make no two of them
    neighbours again.

    Which member is at fault is not known. Honest ones deliver again with others, and the one that never does
    rests longer each time.
    """
    state = transaction.state
    barren = {
        index
        for (index, _), each in state.barren.items()
        if each.rounds >= MOST_WITHHELD_ROUNDS or each.recent.bit_count() > _MOST_WITHHELD_OF_RECENT
    }
    for replica in state.complete_replicas(state.current_round) if barren else ():
        if replica.index in barren:
            since = [each.since for (index, _), each in state.barren.items() if index == replica.index]
            _part(transaction, replica, min(since))


def _part(transaction: Transaction, replica: Replica, since: int) -> None:
    epoch = transaction.state.plan_for(transaction.state.current_round).epoch
    reason = f"replica-{replica.index} has sent no payload since round {since}"
    for one, other in pairwise(replica.members):
        told = one.peer, epoch, other.peer, "", reason, since
        transaction.add(LinkFailed(transaction.now, *told))
