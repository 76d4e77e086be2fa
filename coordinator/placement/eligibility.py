"""Whether a peer may take an assignment: it has caught up, has rested after failures, and has the memory."""

from __future__ import annotations

from dataclasses import replace

from coordinator.placement.cost_model import memory_budget, memory_needed
from coordinator.placement.links import can_be_neighbours
from coordinator.state.state import Peer, State
from protocol.types import Member, PeerId, ReservedAssignment, StageRange

_MOST_DOUBLINGS = 6
_APART_ROUNDS = 8
"""Rounds for which two peers are not made neighbours after their link could not be opened."""


def is_synced(state: State, holder: ReservedAssignment | Member, from_round: int) -> bool:
    """Whether the peer of `holder` can train its stages from `from_round` on.

    It must have attested the anchors of its stages after the round before the last one: when the first stage
    of a round is decided, no peer can have attested that round yet.
    """
    if any(peer == holder.peer for peer, *_ in state.diverged):
        return False
    rounds, least = state.synced.get(holder.peer, {}), least_synced(state, holder, from_round)
    return all(rounds.get(stage, -1) >= least for stage in holder.stages)


def least_synced(state: State, holder: ReservedAssignment | Member, from_round: int) -> int:
    """The round after which the peer of `holder` must have attested the anchors of its stages."""
    least, peer = max(0, from_round - 2), state.peers[holder.peer]
    if peer.role_changes and peer.policy.joins_pipelines and from_round > state.current_round:
        # A full replica still attests the round in which it became a stage peer, before it builds its stages.
        # While no round ends, there is no later one that it could attest.
        least = max(least, state.moved_at.get(holder.peer, -1) + 1)
    return least


def replica_rests_until(state: State, index: int) -> int:
    """The round in which replica `index` may train again; each failure but the first doubles the rest."""
    return _rests_until(*state.retreats.get(index, (0, 0)))


def peer_rests_until(state: State, peer: PeerId) -> int:
    """The round in which `peer` may have an assignment again; each failure but the first doubles the rest."""
    return _rests_until(*state.failures.get(peer, (0, 0)))


def _rests_until(failures: int, last_round: int) -> int:
    # A single failure costs no rest, so a peer that comes back at once trains on.
    return last_round + 2 ** min(failures - 1, _MOST_DOUBLINGS) if failures > 1 else 0


def may_be_neighbours(
    state: State, one: Peer | Member, other: Peer | Member, is_lenient: bool = False
) -> bool:
    """Whether one of the two accepts connections, and no link between them has failed lately.

    `is_lenient`: a failed link may be tried again at once.
    """
    return can_be_neighbours(one, other) and (is_lenient or not apart_until(state, one, other))


def apart_until(state: State, one: Peer | Member, other: Peer | Member) -> int:
    """The round in which two peers may be neighbours again after their link has failed; 0 if it has not."""
    failed = (state.failed_links.get(ends) for ends in ((one.peer, other.peer), (other.peer, one.peer)))
    rounds = (link.round_number + _APART_ROUNDS for link in failed if link and not link.is_moved)
    return max((until for until in rounds if state.current_round < until), default=0)


def fits(state: State, peer: PeerId, stages: StageRange, members_left: int) -> bool:
    """Whether the memory that `peer` had when it joined holds `stages` and the microbatches in flight.

    True where the memory is not known, and for a full replica, which is never refused for its memory.
    """
    needed, budget = memory_for(state, peer, stages, members_left)
    return len(stages) == state.stages or needed <= budget


def memory_for(state: State, peer: PeerId, stages: StageRange, members_left: int) -> tuple[float, float]:
    """Bytes that `peer` needs for `stages`, and the bytes of its memory that may be planned with."""
    declared, measured = state.peers[peer].capacity, state.estimates[peer].capacity
    known = replace(declared, memory_bytes=declared.memory_bytes or measured.memory_bytes)
    needed = memory_needed(state.spec, stages, members_left, declared.device)
    return needed, memory_budget(state.spec, known)
