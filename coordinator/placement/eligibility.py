"""Who may take which seat: has caught up, has rested, has the memory, and can be reached there."""

from __future__ import annotations

from coordinator.placement.cost_model import memory_needed
from coordinator.state.state import Peer, State
from protocol.spec.run import RunSpec
from protocol.types import Member, PeerId, ReservedAssignment, StageRange

_MOST_DOUBLINGS = 6


def is_synced(state: State, place: ReservedAssignment, from_round: int) -> bool:
    """Whether the peer of `place` can train from `from_round` on.

    It must have attested the anchors of its stages after the round before the last one: when the first stage
    of a round is decided, nobody can have attested that round yet.
    """
    if any(found[0] == place.peer for found in state.diverged):
        return False
    rounds = state.synced.get(place.peer, {})
    return all(rounds.get(stage, -1) >= max(0, from_round - 2) for stage in place.stages)


def rests_until(state: State, index: int) -> int:
    """The round in which replica `index` may try again: after each failure but one twice as much later."""
    return _after(*state.retreats.get(index, (0, 0)))


def peer_rests_until(state: State, peer: PeerId) -> int:
    """The round in which `peer` may have a seat again: after each lapse but one twice as much later."""
    return _after(*state.failures.get(peer, (0, 0)))


def _after(times: int, last: int) -> int:
    return last + 2 ** min(times - 1, _MOST_DOUBLINGS) if times > 1 else 0


def fits(state: State, spec: RunSpec, peer: PeerId, stages: StageRange, members_left: int) -> bool:
    """Whether the memory that `peer` had when it joined holds `stages` and so many microbatches in flight.

    Always where it is not known, and for all stages, which a full replica takes on at its own risk.
    """
    declared, measured = state.peers[peer].capacity, state.estimates[peer].capacity
    memory = declared.memory_bytes or measured.memory_bytes
    if not memory or len(stages) == spec.swarm.stages:
        return True
    return memory_needed(spec, stages, members_left, declared.device) <= memory * (1 - spec.grouping.reserve)


def can_be_neighbours(one: Peer | Member, other: Peer | Member) -> bool:
    return bool(one.endpoint or other.endpoint)
