"""Whether a peer may take an assignment: it has caught up, has rested after failures, and has the memory."""

from __future__ import annotations

from dataclasses import replace

from coordinator.placement.cost_model import memory_budget, memory_needed
from coordinator.state.state import State
from protocol.spec.run import RunSpec
from protocol.types import PeerId, ReservedAssignment, StageRange

_MOST_DOUBLINGS = 6


def is_synced(state: State, reservation: ReservedAssignment, from_round: int) -> bool:
    """Whether the peer of `reservation` can train from `from_round` on.

    It must have attested the anchors of its stages after the round before the last one: when the first stage
    of a round is decided, no peer can have attested that round yet.
    """
    if any(peer == reservation.peer for peer, *_ in state.diverged):
        return False
    rounds = state.synced.get(reservation.peer, {})
    return all(rounds.get(stage, -1) >= max(0, from_round - 2) for stage in reservation.stages)


def replica_rests_until(state: State, index: int) -> int:
    """The round in which replica `index` may train again; each failure but the first doubles the rest."""
    return _rests_until(*state.retreats.get(index, (0, 0)))


def peer_rests_until(state: State, peer: PeerId) -> int:
    """The round in which `peer` may have an assignment again; each failure but the first doubles the rest."""
    return _rests_until(*state.failures.get(peer, (0, 0)))


def _rests_until(failures: int, last_round: int) -> int:
    # A single failure costs no rest, so a peer that comes back at once trains on.
    return last_round + 2 ** min(failures - 1, _MOST_DOUBLINGS) if failures > 1 else 0


def fits(state: State, spec: RunSpec, peer: PeerId, stages: StageRange, members_left: int) -> bool:
    """Whether the memory that `peer` had when it joined holds `stages` and the microbatches in flight.

    True where the memory is not known, and for a full replica, which is never refused for its memory.
    """
    declared, measured = state.peers[peer].capacity, state.estimates[peer].capacity
    known = replace(declared, memory_bytes=declared.memory_bytes or measured.memory_bytes)
    return len(stages) == spec.swarm.stages or (
        memory_needed(spec, stages, members_left, declared.device) <= memory_budget(spec, known)
    )
