"""Anchors after rounds that this coordinator has not decided: its folder was restored from an older copy.

What peers tell of them is in no log, and counts for one thing: the operator may let the run go on from what
most peers hold (coordinator.rollback).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from coordinator.run.state.commands import Attest
from coordinator.run.state.events import PeerSeen
from coordinator.run.state.persistent_map import PersistentMap
from coordinator.run.state.state import State
from coordinator.run.state.text import counted
from coordinator.run.state.transaction import Transaction
from protocol.types import Part, PeerId


def note_ahead(transaction: Transaction, command: Attest) -> None:
    """Remember an anchor, and of the same part those that its peer told of the rounds beside."""
    seen, about = transaction.state.last_seen[command.peer], (command.stage, command.part)
    kept = {
        key: digest
        for key, digest in seen.ahead.items()
        if (key[0], key[2]) != about or abs(key[1] - command.round_number) == 1
    }
    if command.round_number <= transaction.state.spec.rounds:
        ahead = {**kept, (command.stage, command.round_number, Part(command.part)): command.digest}
        told = seen.round_number, seen.inner_step, seen.waits, seen.kept, ahead
        transaction.add(PeerSeen(transaction.now, command.peer, *told))


def told_ahead(state: State, most: int) -> set[int]:
    """The rounds up to `most` that are not decided here, and after which live peers hold anchors."""
    told = (state.last_seen[peer].ahead for peer in state.peers if _has_a_say(state, peer))
    return {each for ahead in told for _, each, _ in ahead if state.current_round <= each <= most}


def problem_ahead(state: State, round_number: int, parts: Sequence[tuple[int, Part]]) -> str:
    """Why the run cannot go on from the anchors after a round that is not decided here; "" if it can.

    More than half of the live peers that should hold an anchor must hold the same one. They are trusted.
    """
    if round_number not in told_ahead(state, round_number):
        return f"round {round_number} is not decided"
    for stage, part in parts:
        (_, alike), among = _most_alike(state, stage, round_number, part)
        if 2 * alike <= among:
            return f"only {alike} of {counted(among, 'peer')} hold the same {part} {stage}"
    return ""


def digest_ahead(state: State, stage: int, round_number: int, part: Part) -> str:
    """The digest that most peers tell of an anchor."""
    return _most_alike(state, stage, round_number, part)[0][0]


def _most_alike(state: State, stage: int, round_number: int, part: Part) -> tuple[tuple[str, int], int]:
    """The digest that most peers tell of an anchor, how many do, and how many should hold the anchor."""
    key = stage, round_number, part
    attested = state.digests.get(key, PersistentMap[PeerId, str]())  # where this stage alone has decided
    told = [
        state.last_seen[peer].ahead.get(key, attested.get(peer))
        for peer, held in state.reservations.items()
        if _has_a_say(state, peer) and (part is Part.EMBEDDING or stage in held.stages)
    ]
    return (Counter(each for each in told if each).most_common(1) or [("", 0)])[0], len(told)


def _has_a_say(state: State, peer: PeerId) -> bool:
    return state.peers[peer].is_live and not state.is_unproven(peer)
