"""Whether a plan keeps the rules of placement (coordinator.placement.rules)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from coordinator.placement.rules import can_be_neighbours, fits, has_moved, is_whole
from coordinator.run.state.records import peers_of
from coordinator.run.state.state import State
from protocol.spec.link import width_order
from protocol.spec.run import RunSpec
from protocol.types import Plan, Replica


def violations(before: State, plan: Plan) -> Iterator[str]:
    """Each rule that `plan` breaks as the successor of the newest plan of `before`, as a sentence."""
    spec, newest = before.spec, before.plans[-1]
    if plan.epoch != newest.epoch + 1 or plan.from_round < newest.from_round:
        yield f"it follows plan {newest.epoch} from round {newest.from_round} on"
    assigned = [member.peer for replica in plan.replicas for member in replica.members]
    if len(set(assigned)) < len(assigned):
        yield "it assigns a peer twice"
    if not is_whole(spec, plan.replicas):
        yield "it does not divide the batch"
    if not plan.reason:
        yield "it has no reason"
    running = {replica.index: replica for replica in newest.replicas}
    absent = before.absent.get(newest.epoch, frozenset())
    for replica in plan.replicas:
        members, same = peers_of(replica), running.get(replica.index)
        yield from (f"{replica.name} {what}" for what in chain_violations(spec, replica))
        if plan.repairs and replica == same:
            continue  # it stays as it is in this round, also if it is broken
        if gone := [peer for peer in members if not before.peers[peer].is_live]:
            yield f"{replica.name} has the members {gone}, which are gone"
        if same is None or members != peers_of(same) or absent.intersection(members):
            newcomers = _member_violations(before, replica, plan.from_round)
            yield from (f"{replica.name} {what}" for what in newcomers)
    planned = {replica.index for replica in plan.replicas}
    for replica in newest.replicas:
        can_stay = all(
            each.peer not in absent
            and before.peers[each.peer].is_staying
            and each.peer in before.reservations
            and not has_moved(before, replica, each)
            for each in replica.members
        )
        if can_stay and replica.index not in planned:
            yield f"{replica.name} is left out although its members can stay"


def chain_violations(spec: RunSpec, replica: Replica) -> Iterator[str]:
    """What is wrong with the stages, neighbours and links of `replica`, whatever its peers are."""
    if [stage for member in replica.members for stage in member.stages] != [*range(spec.swarm.stages)]:
        yield "does not have each stage once, in order"
    if len(replica.links) != len(replica.members) - 1:
        yield "does not have a link between each two neighbours"
    if not all(can_be_neighbours(one, other) for one, other in pairwise(replica.members)):
        yield "has two neighbours that can only dial"
    narrowest, widest = (width_order(spec.link.possible_ks[end]) for end in (0, -1))
    if not all(narrowest <= width_order(link.k) <= widest for link in replica.links):
        yield "has a link whose k the run does not allow"


def _member_violations(state: State, replica: Replica, from_round: int) -> Iterator[str]:
    """What members of a chain that is new or was broken lack."""
    for position, member in enumerate(replica.members):
        reserved = state.reservations.get(member.peer)
        if not state.peers[member.peer].is_staying:
            yield f"has {member.peer}, which does not stay"
        if reserved is None or reserved.stages != member.stages:
            yield f"gives {member.peer} other stages than were reserved for it"
        had = reserved is not None and reserved.slot == (replica.index, position)
        if not had and not fits(state, member.peer, member.stages, len(replica.members) - position):
            yield f"has {member.peer}, whose memory does not hold its stages"
        rounds = state.synced.get(member.peer, {})
        if any(rounds.get(stage, -1) < max(0, from_round - 2) for stage in member.stages):
            yield f"has {member.peer}, which is behind"
