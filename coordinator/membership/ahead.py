"""Anchors after rounds that this coordinator has not decided: its folder was restored from an older copy.

What peers tell of them is in no log, and counts for one thing: the operator may let the run go on from what
most peers hold (coordinator.rollback).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from coordinator.base.persistent_map import PersistentMap
from coordinator.base.phrases import counted
from coordinator.run.state.commands import Attest
from coordinator.run.state.events import PeerSeen
from coordinator.run.state.state import State
from coordinator.run.state.transaction import Transaction
from protocol.types import Part, PeerId


def note_ahead(transaction: Transaction, command: Attest) -> None:
    """Remember an anchor, and of its part those that its peer told of the rounds beside and on its disk."""
    seen, about = transaction.state.last_seen[command.peer], (command.stage, command.part)
    on_disk = set(seen.kept)
    kept = {
        key: digest
        for key, digest in seen.ahead.items()
        if (key[0], key[2]) != about
        or abs(key[1] - command.round_number) == 1
        or not on_disk.isdisjoint((key[1], command.round_number))
    }
    ahead = {**kept, (command.stage, command.round_number, Part(command.part)): command.digest}
    told = seen.round_number, seen.inner_step, seen.waits, seen.kept, ahead
    transaction.add(PeerSeen(transaction.now, command.peer, *told))


def told_ahead(state: State, most: int) -> set[int]:
    """The rounds up to `most` that are not decided here, and after which live peers hold anchors."""
    told = (state.last_seen[peer].ahead for peer in state.peers if _has_a_say(state, peer))
    return {each for ahead in told for _, each, _ in ahead if state.current_round <= each <= most}


def problem_ahead(state: State, round_number: int, parts: Sequence[tuple[int, Part]]) -> str:
    """Why the run cannot go on from the anchors after a round that is not decided here; "" if it can.

    More than half of the live peers that should hold an anchor must tell the same one. They are trusted. One
    of them must still have it: a peer also tells the anchor before its own, which it has replaced.
    """
    if round_number not in told_ahead(state, round_number):
        return f"round {round_number} is not decided"
    for stage, part in parts:
        told = _told(state, stage, round_number, part)
        digest, alike = _most_alike(told)
        if 2 * alike <= len(told):
            return f"only {alike} of {counted(len(told), 'peer')} hold the same {part} {stage}"
        if not any(_has(state, peer, stage, round_number, part) for peer in told if told[peer] == digest):
            return f"no live peer keeps {part} {stage}"
    return ""


def digest_ahead(state: State, stage: int, round_number: int, part: Part) -> str:
    """The digest that most peers tell of an anchor."""
    return _most_alike(_told(state, stage, round_number, part))[0]


def kept_ahead(state: State, stage: int, round_number: int, part: Part) -> list[PeerId]:
    """The peers that have the anchor of :func:`digest_ahead` on their disks alone.

    None where it is still the newest one of a peer: that goes on from it with all that it has learned since.
    """
    told = _told(state, stage, round_number, part)
    digest, _ = _most_alike(told)
    alike = [peer for peer in told if told[peer] == digest]
    if any(_newest(state, peer, stage, part) == round_number for peer in alike):
        return []
    return [peer for peer in alike if round_number in state.last_seen[peer].kept]


def _told(state: State, stage: int, round_number: int, part: Part) -> dict[PeerId, str | None]:
    """The digest that each peer has told which should hold the anchor; None of one that has told none."""
    key = stage, round_number, part
    attested = state.digests.get(key, PersistentMap[PeerId, str]())  # where this stage alone has decided
    return {
        peer: state.last_seen[peer].ahead.get(key, attested.get(peer))
        for peer, held in state.reservations.items()
        if _has_a_say(state, peer) and (part is Part.EMBEDDING or stage in held.stages)
    }


def _most_alike(told: Mapping[PeerId, str | None]) -> tuple[str, int]:
    """The digest that most peers tell, and how many do."""
    return (Counter(filter(None, told.values())).most_common(1) or [("", 0)])[0]


def _has(state: State, peer: PeerId, stage: int, round_number: int, part: Part) -> bool:
    """Whether the anchor is the newest one of the peer, or kept on its disk."""
    is_kept = round_number in state.last_seen[peer].kept
    return is_kept or _newest(state, peer, stage, part) in (None, round_number)


def _newest(state: State, peer: PeerId, stage: int, part: Part) -> int | None:
    """The newest round that the peer has told of the part; None if it has told none that is unknown here."""
    told = state.last_seen[peer].ahead
    return max((number for its_stage, number, of in told if (its_stage, of) == (stage, part)), default=None)


def _has_a_say(state: State, peer: PeerId) -> bool:
    return state.peers[peer].is_live and not state.is_unproven(peer)
