"""The rules of placement: what an admissible plan is, and who may have an assignment.

A plan that breaks one of these rules is never made. The checks of the tests (tests/support/plan_rules.py)
import them.

- **Stages.** The members of a replica host each stage once, in order.
- **Memory.** A member's memory holds its stages and the microbatches in flight. A full replica is never
  refused for its memory, and a peer may return to a position that it had.
- **Reachability.** One of two neighbours accepts connections, and no link between them has failed lately. At
  each stage, some replica's host is reached by others: else no payload could be exchanged.
- **State.** A new member has attested the newest anchor of its stages, has rested after failures, and stays.
- **Roles.** Only peers of a role that joins pipelines are members of one (protocol.roles).
- **k** of a link is one of the run's possible values (coordinator.placement.tuning chooses it).
- **Shares** of the microbatches add up to the batch; each is bounded by what its replica has delivered.
- **Patience.** A plan that only saves time comes at least SETTLE_ROUNDS after the one before it, and must
  shorten a step by MARGIN.

A new rule of neighbours is a line in :func:`neighbour_obstacle`, one of members in :func:`member_obstacle`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import ceil

from coordinator.base.phrases import short
from coordinator.placement.cost_model import memory_budget, memory_needed, present_capacity
from coordinator.run.state.records import Peer, peers_of
from coordinator.run.state.state import APART_ROUNDS, KEPT_ROUNDS, State
from protocol.group.batch import whole_batch, work_of
from protocol.spec.run import RunSpec
from protocol.status import Cause, CauseCode
from protocol.trust.endpoints import ip_version
from protocol.types import (
    Dialer,
    Lifecycle,
    Link,
    Member,
    PeerId,
    Reachability,
    Replica,
    ReservedAssignment,
    StageRange,
    entries_of,
)

MOST_SHARE = 8
"""A replica takes at most this many times the usual microbatches."""
_MOST_GROWTH = 2
"""A share grows at most to this many times its former value, and only after that much was delivered: a
replica only claims its speed, and its share is its weight in the outer step."""
_MOST_DOUBLINGS = 6
_SLOWEST_LINE = 1e6
"""Bytes per second at which a home fetches the state of its stages at least: 8 Mb/s."""


def member_of(peer: Peer, stages: StageRange) -> Member:
    """`peer` as a member with `stages`, at its present endpoint."""
    return Member(peer.peer, stages, peer.endpoint, peer.reachability is Reachability.RELAYED)


def can_be_neighbours(one: Peer | Member, other: Peer | Member) -> bool:
    """Whether one of the two accepts connections."""
    return bool(one.endpoint or other.endpoint)


def may_be_neighbours(
    state: State, one: Peer | Member, other: Peer | Member, is_lenient: bool = False
) -> bool:
    """Whether two peers may be neighbours now; `is_lenient`: a failed link may be tried again at once."""
    return not neighbour_obstacle(state, one, other, is_lenient)


def neighbour_obstacle(
    state: State, peer: Peer | Member, other: Peer | Member, is_lenient: bool = False
) -> str:
    """Why `peer` may not be the neighbour of `other` now; "" if it may.

    A peer whose scores do not speak for it yet is only next to its like: the work of others beside it would
    count for nothing. What is asked of a peer here is also its kind in replan.rebuilt_chain.
    """
    if not can_be_neighbours(peer, other):
        return f"neither this peer nor its neighbour {short(other.peer)} has an endpoint"
    if not is_lenient and (until := apart_until(state, peer, other)):
        return f"its link to {short(other.peer)} has failed; it is tried again from round {until} on"
    if state.is_unproven(peer.peer) is not state.is_unproven(other.peer):
        return f"this peer or its neighbour {short(other.peer)} counts for nothing yet"
    return ""


def apart_until(state: State, one: Peer | Member, other: Peer | Member) -> int:
    """The round in which two peers may be neighbours again after their link has failed; 0 if it has not."""
    failed = (state.failed_links.get(ends) for ends in ((one.peer, other.peer), (other.peer, one.peer)))
    rounds = (link.round_number + APART_ROUNDS for link in failed if link and not link.is_moved)
    return max((until for until in rounds if state.current_round < until), default=0)


def are_parted(state: State, members: Sequence[Member | ReservedAssignment]) -> bool:
    """Whether two neighbours among `members` are apart although their link was open."""
    failed = ((one.peer, other.peer) for one, other in pairwise(members)) if state.failed_links else ()
    return any(_is_parted(state, each) or _is_parted(state, each[::-1]) for each in failed)


def _is_parted(state: State, ends: tuple[PeerId, PeerId]) -> bool:
    link = state.failed_links.get(ends)
    is_recent = link is not None and state.current_round < link.round_number + APART_ROUNDS
    return link is not None and is_recent and link.is_of_frames


def unreached_hosts(replicas: Sequence[Replica], peers: Mapping[PeerId, Peer]) -> list[PeerId]:
    """The hosts of a stage of which none is reached by others: their replicas cannot exchange payloads.

    Empty if there is no such stage, or one replica alone.
    """
    if len(replicas) < 2:
        return []
    for stage in range(replicas[0].members[-1].stages.stop):
        # Every tick asks this: it ends at the first host that is reached.
        hosts = (replica.host_of(stage).peer for replica in replicas)
        if all(peers[each].reachability is Reachability.DIAL_ONLY for each in hosts):
            return [replica.host_of(stage).peer for replica in replicas]
    return []


def links_between(members: Sequence[Member], k: int | Sequence[int]) -> tuple[Link, ...]:
    """Links with one `k` for all or one for each.

    The upstream end dials if the other accepts connections; but no link goes through a relay that can go
    without. Of two ends at addresses of two versions of IP, that of IPv6 dials: a machine that has both
    announces IPv6, so the other end has IPv4 alone.
    """
    ks = [k] * (len(members) - 1) if isinstance(k, int) else k
    ends = zip(pairwise(members), ks, strict=True)
    return tuple(Link(width, _dialer(upstream, downstream)) for (upstream, downstream), width in ends)


def _dialer(upstream: Member, downstream: Member) -> Dialer:
    is_upstream_open = bool(upstream.endpoint) and not upstream.relayed
    if not downstream.endpoint or (downstream.relayed and is_upstream_open):
        return Dialer.DOWNSTREAM
    if upstream.endpoint and upstream.relayed == downstream.relayed:
        versions = (ip_version(each.endpoint) for each in (upstream, downstream))
        return Dialer.DOWNSTREAM if tuple(versions) == (4, 6) else Dialer.UPSTREAM
    return Dialer.UPSTREAM


def obstacles(state: State, from_round: int) -> dict[int, Cause]:
    """By index: why a replica cannot train from `from_round` on. Replicas that can train are left out."""
    reserved = {reservation.slot: reservation for reservation in state.reservations.values()}
    found = {}
    for index in sorted({replica for replica, _ in reserved}):
        causes, done = [], 0
        for position, stages in enumerate(state.layout(index)):
            holder = reserved.get((index, position))
            done = max(done, 0 if holder is None else _offered_steps(state, holder))
            if holder is None:
                causes.append(Cause(CauseCode.VACANT, stages=tuple(stages)))
            elif (cause := member_obstacle(state, holder, from_round)) is not None:
                causes.append(cause)
        causes += [link for link in closed_links(state) if link.replicas == (index,)]
        causes += _parted(state, index, reserved)
        rests = replica_rests_until(state, index)
        if not causes and rests > from_round:
            causes.append(Cause(CauseCode.REPLICA_RESTS, round_number=rests))
        if causes:
            cause = Cause(CauseCode.OBSTRUCTED, replicas=(index,), causes=tuple(causes))
            found[index] = replace(cause, count=done, total=state.spec.inner.steps) if done else cause
    return found


def _offered_steps(state: State, holder: ReservedAssignment) -> int:
    """The inner steps behind what a member has offered in the open round, if it takes part in it."""
    number, assignment = state.current_round, state.assignment(holder.peer, state.current_round)
    offers = [state.round_of(stage, number).offers.get(holder.peer) for stage in holder.stages]
    weight = max((each.weight for each in offers if each is not None), default=0.0)
    return round(weight / assignment.replica.weight * state.spec.inner.steps) if assignment else 0


def closed_links(state: State, peer: PeerId | None = None) -> Iterator[Cause]:
    """The links that could not be opened; of `peer`, those whose ends still have the same addresses."""
    for ends, link in state.failed_links.items():
        if not link.is_of_frames and (peer is None or (peer in ends and not link.is_moved)):
            yield Cause(
                CauseCode.LINK_CLOSED,
                peers=ends,
                replicas=(link.replica,),
                address=link.address,
                detail=link.reason,
            )


def _parted(
    state: State, index: int, reserved: Mapping[tuple[int, int], ReservedAssignment]
) -> Iterator[Cause]:
    """Why neighbours that hold places of replica `index` are apart although their link was open."""
    holders = [reserved.get((index, position)) for position in range(len(state.layout(index)))]
    for one, other in pairwise(holders):
        for ends in ((one.peer, other.peer), (other.peer, one.peer)) if one and other else ():
            if _is_parted(state, ends):
                link = state.failed_links[ends]
                yield Cause(
                    CauseCode.FRAME_REFUSED if link.since is None else CauseCode.NO_PAYLOAD,
                    peers=ends,
                    replicas=(link.replica,),
                    round_number=link.round_number if link.since is None else link.since,
                    detail=link.reason,
                )


def barren_replicas(state: State) -> dict[int, Cause]:
    """By index: the replicas that have withheld the payload of their newest round."""
    since = dict[int, int]()
    for (index, _), each in state.barren.items():
        if each.rounds:
            since[index] = min(since.get(index, each.since), each.since)
    return {
        index: Cause(CauseCode.NO_PAYLOAD, replicas=(index,), round_number=number)
        for index, number in since.items()
    }


def member_obstacle(
    state: State, reservation: ReservedAssignment, from_round: int, is_lenient: bool = False
) -> Cause | None:
    """Why the peer of `reservation` cannot train from `from_round` on; None where it can.

    `is_lenient`: it needs no rest after failures.
    """
    peer, rests = state.peers[reservation.peer], peer_rests_until(state, reservation.peer)
    if not peer.is_live:
        code = CauseCode.MEMBER_GONE
    elif peer.lifecycle is Lifecycle.DRAINING:
        code = CauseCode.MEMBER_DRAINS
    elif rests > from_round and not is_lenient:
        code = CauseCode.MEMBER_RESTS
    elif not is_synced(state, reservation, from_round):
        code = CauseCode.MEMBER_SYNCS
    else:
        return None
    cause = Cause(code, peers=(peer.peer,), stages=tuple(reservation.stages))
    if code is CauseCode.MEMBER_RESTS:
        return replace(cause, round_number=rests, count=state.failures[peer.peer][0])
    return cause


def is_synced(state: State, holder: ReservedAssignment | Member, from_round: int) -> bool:
    """Whether the peer of `holder` can train its stages from `from_round` on.

    It must have attested the anchors of its stages after the round before the last one: when the first stage
    of a round is decided, no peer can have attested that round yet.
    """
    if any(peer == holder.peer for peer, *_ in state.diverged):
        return False
    rounds, least = state.synced.get(holder.peer, {}), least_synced(state, holder, from_round)
    return all(rounds.get(stage, -1) >= least for stage in holder.stages)


def is_overdue(state: State, peer: Peer, now: float) -> bool:
    """Whether `peer` has had its reservation for long, and does not follow the rounds of its stages.

    It may take as long as a member may be silent, and the time to fetch the state.
    """
    reserved = state.reservations.get(peer.peer)
    if reserved is None or not state.plans or state.has_attested(peer.peer, max(0, state.current_round - 2)):
        return False
    timing = state.spec.timing
    nbytes = 4 * sum(state.spec.parameters_of(stage) for stage in reserved.stages)
    since = max(state.promised.get(peer.peer, peer.joined_at), state.started_at)
    return now - since > timing.link + timing.match_window + nbytes / _SLOWEST_LINE


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


def fits(state: State, peer: PeerId, stages: StageRange, members_left: int) -> bool:
    """Whether the memory that `peer` had when it joined holds `stages` and the microbatches in flight.

    True where the memory is not known, and for a full replica, which is never refused for its memory.
    """
    needed, budget = memory_for(state, peer, stages, members_left)
    return len(stages) == state.stages or needed <= budget


def memory_for(state: State, peer: PeerId, stages: StageRange, members_left: int) -> tuple[float, float]:
    """Bytes that `peer` needs for `stages`, and the bytes of its memory that may be planned with."""
    able = present_capacity(state.peers[peer], state.estimates.get(peer))
    needed = memory_needed(state.spec, stages, members_left, able.device, able.main_bytes)
    return needed, memory_budget(state.spec, able)


def filled_replicas(state: State) -> set[int]:
    """The replicas of which each position is reserved for a peer that stays."""
    filled: dict[int, set[int]] = {}
    for each in state.reservations.values():
        if state.peers[each.peer].is_staying:
            filled.setdefault(each.replica, set()).add(each.position)
    return {index for index, positions in filled.items() if len(positions) == len(state.layout(index))}


def has_moved(state: State, replica: Replica, member: Member) -> bool:
    """Whether a member that stays has another position reserved, because its role has changed."""
    reserved = state.reservations.get(member.peer)
    at = (replica.index, member.stages)
    is_elsewhere = reserved is not None and (reserved.replica, reserved.stages) != at
    return is_elsewhere and state.peers[member.peer].is_staying


def is_whole(spec: RunSpec, replicas: Sequence[Replica]) -> bool:
    """Whether the present shares add up to the batch."""
    return sum(map(spec.microbatches_of, replicas)) == whole_batch(spec, len(replicas))


def largest_share(total: int, replicas: int) -> int:
    """The most of `total` microbatches that one of `replicas` takes; so many for each are enough for all.

    Half of all; three quarters if there are two replicas, since one of them has half or more in any case.
    """
    part = total // 2 if replicas > 2 else 3 * total // 4
    return max(ceil(total / replicas), min(MOST_SHARE * total // replicas, part))


def share_limits(
    state: State, replicas: Sequence[Replica], delivered: Mapping[int, tuple[float, float]]
) -> list[int]:
    """The most microbatches that each of `replicas` may take; their sum is at least that of all shares.

    - A replica that has delivered nothing yet takes at most what it takes now; of a constant batch, at most
      an equal share.
    - A replica whose last payload lacked some of its work takes at most what that payload contained.
    - A replica with the same members as in the newest plan takes at most twice what it takes now.

    Where these limits sum up to less than the batch, each replica may at least keep its share.

    Args:
        delivered: :func:`delivered_work` of `state`.
    """
    spec, usual = state.spec, state.spec.inner.microbatches
    total = whole_batch(spec, len(replicas))
    equal, bound = ceil(total / len(replicas)), largest_share(total, len(replicas))
    newest = {each.index: peers_of(each) for each in state.plans[-1].replicas}
    present = [spec.microbatches_of(replica) for replica in replicas]
    limits = []
    for replica, now in zip(replicas, present, strict=True):
        work, assigned = delivered.get(replica.index, (0.0, 0.0))
        if not assigned:
            most = now if spec.grouping.batch == "variable" else equal
        elif work < assigned:
            most = min(now, max(1, ceil(work * usual)))  # work = microbatches / usual
        elif peers_of(replica) == newest.get(replica.index):
            most = _MOST_GROWTH * now
        else:
            most = bound
        limits.append(min(most, bound))
    # The present shares may be too few as well, if a replica has left: then equal ones are enough.
    for least in (present, [equal] * len(replicas)):
        if sum(limits) < total:
            limits = [max(most, min(n, bound)) for most, n in zip(limits, least, strict=True)]
    return limits


def delivered_work(state: State) -> dict[int, tuple[float, float]]:
    """By replica: the work behind its last committed payload of stage 0, and its work in that plan."""
    found = dict[int, tuple[float, float]]()
    newest = state.current_round
    for round_number in range(newest, max(0, newest - KEPT_ROUNDS), -1):
        decision = state.decisions.get((0, round_number))
        for entry in entries_of(decision) if decision else ():
            assignment = state.assignment(entry.descriptor.owner, round_number)
            if assignment is not None:
                replica, weight = assignment.replica, entry.descriptor.weight
                found.setdefault(replica.index, (weight, work_of(state.spec, replica)))
    return found
