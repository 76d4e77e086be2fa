"""Repairs of broken replicas within a round: a member's loss costs what it has trained, and nothing else.

Where a chain breaks, its members retreat, and tell how many inner steps they have done. Once all are heard of
or gone, a plan for the same round gives the seats of those that are gone to spares. They start from the
anchor, at the first step that no member has finished; a step that one has finished is not trained again.
Where all members are there and their links have ended, the same members go on.

    weight of a member's payload = weight of the replica * (inner steps that it has finished) / H

Who takes a seat beside other replicas offers nothing in this round; its next payload has what it has learned.
The other replicas notice nothing: their offers stay, and so do their samples.
"""

from __future__ import annotations

from coordinator.base.phrases import listed, short, stages_of
from coordinator.base.replacing import replace
from coordinator.placement.phases import expected_seconds
from coordinator.placement.replan import rebuilt_chain
from coordinator.placement.rules import is_synced, links_between, member_obstacle, member_of
from coordinator.run.state.events import PlanAdopted
from coordinator.run.state.records import Break, Peer
from coordinator.run.state.state import State
from coordinator.run.state.transaction import Transaction
from protocol.math.sampling import next_first_sample
from protocol.status import RunPhase, Wait
from protocol.types import Member, PeerId, Plan, Replica, ReservedAssignment

_SILENT_HEARTBEATS = 2.5
"""A member of a broken replica that is silent for so long is gone: the others have told of the break."""
_WAITED_HEARTBEATS = 10.0
"""Members of a broken replica wait so long for others to take seats. What is shorter is not worth a wait."""
_HELD_HEARTBEATS = 15.0
"""The round is held for so long: within these, members that have waited in vain offer what they have."""
_MOST_REPAIRS = 3
"""So often in a round a replica is repaired: who breaks it again and again would hold up the others."""


def may_wait(state: State, replica: Replica, steps: int) -> bool:
    """Whether a member of `replica`, which has broken after `steps`, waits for a repair before it offers.

    Not where the round closes soon: half of the replicas, by weight, have answered then.
    """
    round_number, replicas = state.current_round, state.plans[-1].replicas
    answered = sum(each.weight for each in replicas if each.index in state.answered)
    is_closing = 2 * answered >= sum(each.weight for each in replicas) or any(
        (stage, round_number) in state.decisions or state.round_of(stage, round_number).group is not None
        for stage in range(state.stages)
    )
    if len(replica.members) == 1 or replica.index in state.answered or is_closing:
        return False
    left = 1 - steps / state.spec.inner.steps
    is_worth_it = left > 0 and expected_seconds(state, replica) * left > _seconds(state, _WAITED_HEARTBEATS)
    return is_worth_it and _repairs_of(state, replica) < _MOST_REPAIRS


def seconds_to_repair(state: State, peer: PeerId, former: Break | None, epoch: int, now: float) -> float:
    """How long `peer` waits, after its retreat under the plan of `epoch`, until its replica goes on.

    `former` is what it had told before. 0 if nothing has come of its retreat.
    """
    told, assignment = state.breaks.get(peer), state.assignment(peer, state.current_round)
    if told is None or not told.steps or assignment is None:
        return 0.0
    # It may repeat a call whose answer was lost: then it does not know the repair yet.
    is_repaired = assignment.replica.resumed_in > epoch
    if told is former and state.takes_part(peer, state.current_round) and not is_repaired:
        return 0.0
    return max(0.0, _until(state, told, _WAITED_HEARTBEATS) - now)


def awaits_repair(state: State, now: float) -> bool:
    """Whether members of a broken replica wait for its repair or its links, and have not offered yet.

    None of them waits for longer than it was told to: a repair that fails leaves it the time to offer.
    """
    return any(
        told.steps
        and now < _until(state, told, _HELD_HEARTBEATS)
        and state.may_offer(peer, state.current_round)
        and not _has_answered(state, peer)
        for peer, told in state.breaks.items()
    )


def has_survivor(state: State, stage: int) -> bool:
    """Whether a host of `stage` still computes in the open round, and does not know that its chain is broken.

    What it offers then counts. Its replica is waited for as any other that is late.
    """
    round_number, plan = state.current_round, state.plan_for(state.current_round)
    round_state, absent = state.round_of(stage, round_number), state.absent.get(plan.epoch, ())
    for replica in plan.replicas if absent else ():
        peer = replica.host_of(stage).peer
        seen = state.last_seen[peer]
        computes = (seen.round_number, seen.inner_step > 0) == (round_number, True)
        is_broken = any(member.peer in absent for member in replica.members)
        has_answered = peer in round_state.offers or peer in round_state.withheld
        is_here = state.peers[peer].is_live and state.takes_part(peer, round_number)
        if is_broken and computes and is_here and not has_answered:
            return True
    return False


def _has_answered(state: State, peer: PeerId) -> bool:
    """Whether `peer` has offered a payload of the current round, or withheld it."""
    rounds = (state.round_of(stage, state.current_round) for stage in range(state.stages))
    return any(peer in each.offers or peer in each.withheld for each in rounds)


def repair(transaction: Transaction) -> None:
    """Adopt a plan under which broken replicas go on in the current round, if there is one."""
    state = transaction.state
    if not _is_within_a_phase(state):
        return
    plan = state.plans[-1]
    repaired, reasons, taken = dict[int, Replica](), list[str](), set[PeerId]()
    for replica in plan.replicas:
        found = _repaired(state, replica, taken, transaction.now)
        if found is not None:
            repaired[replica.index] = found
            reasons.append(_change(replica, found))
            taken |= {member.peer for member in found.members}
    if repaired:
        replicas = tuple(repaired.get(each.index, each) for each in plan.replicas)
        first_sample = next_first_sample(plan, state.spec, state.current_round)
        reason = f"round {state.current_round} goes on: {listed(reasons)}"
        newer = Plan(
            *(plan.epoch + 1, state.current_round, first_sample, replicas, reason, plan.changes),
            repairs=plan.epoch if plan.from_round < state.current_round else plan.repairs or plan.epoch,
        )
        transaction.add(PlanAdopted(transaction.now, newer))


def _until(state: State, told: Break, heartbeats: float) -> float:
    """The end of a wait after a break was told: a coordinator that was away has repaired nothing."""
    return max(told.at, state.started_at) + _seconds(state, heartbeats)


def _seconds(state: State, heartbeats: float) -> float:
    return heartbeats * state.spec.timing.heartbeat_of(state.live)


def _is_within_a_phase(state: State) -> bool:
    """Whether a replica of the current round is broken, and no decision and no plan for the next is made."""
    is_broken = state.absent.get(state.epoch) or state.failed_links
    if state.phase is not RunPhase.TRAINING or state.is_held or not is_broken:
        return False
    round_number, plan = state.current_round, state.plans[-1]
    is_open = plan.from_round <= round_number <= state.spec.rounds
    return is_open and not any((stage, round_number) in state.decisions for stage in range(state.stages))


def _repairs_of(state: State, replica: Replica) -> int:
    """How often `replica` has been repaired in the current round."""
    plans = [plan for plan in state.plans if plan.repairs and plan.from_round == state.current_round]
    found = ((each, plan) for plan in plans for each in plan.replicas if each.index == replica.index)
    return sum(each.resumed_in == plan.epoch for each, plan in found)


def _repaired(state: State, replica: Replica, taken: set[PeerId], now: float) -> Replica | None:
    """`replica` as it goes on in the current round; None where it is not broken, or cannot go on yet."""
    peers, unlinked = {member.peer for member in replica.members}, _unlinked(state, replica)
    if state.absent.get(state.epoch, frozenset()).isdisjoint(peers) and not unlinked:
        return None
    told = [state.breaks[peer].at for peer in peers if peer in state.breaks]
    done = {member.peer: _steps(state, member, max(told, default=0.0), now) for member in replica.members}
    # Who has a seat since this round, and no link, gives it to another spare.
    staying = {peer: steps for peer, steps in done.items() if steps or (steps == 0 and peer not in unlinked)}
    if not staying or not may_wait(state, replica, max(staying.values())):
        return None
    trained = [steps for steps in staying.values() if steps] or [0]
    if max(trained) - min(trained) > 1:
        return None  # the members of a chain are one step apart at most: one of them lies
    if not all(peer in staying or peer in unlinked or _is_gone(state, peer, now) for peer in done):
        return None  # it is still there, and will tell
    ready = {
        (replica.index, position): ReservedAssignment(member.peer, replica.index, position, member.stages)
        for position, member in enumerate(replica.members)
        if member.peer in staying
    }
    # Who can go on keeps its seat, also where a link to it has failed: else any member could unseat another.
    lost = {member.stages for member in replica.members if member.peer not in staying}
    spares = [spare for spare in _spares(state, taken, now) if spare.stages in lost]
    chain = rebuilt_chain(state, replica.index, ready, spares, is_lenient=False)
    if chain is None:
        return None
    members = tuple(member_of(state.peers[each.peer], each.stages) for each in chain)
    links = links_between(members, [link.k for link in replica.links])
    step, epoch = max(trained), state.epoch + 1
    return replace(replica, members=members, links=links, resumes_at=step, resumed_in=epoch)


def _steps(state: State, member: Member, broken_at: float, now: float) -> int | None:
    """The inner steps of the round that a member has done; None where it cannot go on, or has not told.

    `broken_at`: when a member of its replica has last told of a break.
    """
    peer, round_number = member.peer, state.current_round
    is_here = state.peers[peer].is_live and not _is_silent(state, state.peers[peer], now)
    if not is_here or not is_synced(state, member, round_number):
        return None
    seen, told = state.last_seen[peer], state.breaks.get(peer)
    if told is not None and told.steps:
        has_gone_on = seen.round_number == round_number and seen.inner_step > told.steps
        # After a repair that has failed, it is there if it was heard of since, and does not train.
        waits = seen.at > broken_at and not {Wait.LINKS, Wait.PLAN}.isdisjoint(seen.waits)
        is_there = (told.epoch == state.epoch or waits) and now < _until(state, told, _WAITED_HEARTBEATS)
        return told.steps if is_there and not has_gone_on else None
    # It follows, or opens its links: it can begin at any step, and loses nothing.
    is_idle = peer in state.absent.get(state.epoch, ()) or Wait.LINKS in seen.waits
    begins = is_idle and (seen.round_number, seen.inner_step) == (round_number, 0)
    can_begin = told is None or told.steps == 0
    return 0 if begins and can_begin and _has_anchors(state, member) else None


def _is_gone(state: State, peer: PeerId, now: float) -> bool:
    known, told = state.peers[peer], state.breaks.get(peer)
    has_failed = told is not None and told.steps is None
    is_new = peer in state.absent.get(state.epoch, ()) and known.joined_at > state.began_at
    return not known.is_live or has_failed or is_new or _is_silent(state, known, now)


def _unlinked(state: State, replica: Replica) -> set[PeerId]:
    """Members of `replica` that took a seat within the round, and to which a link cannot be opened."""
    links = state.failed_links.items()
    ends = {peer for pair, link in links if link.epoch == state.epoch for peer in pair}
    return {each.peer for each in replica.members if each.peer in ends and state.has_entered(each.peer)}


def _is_silent(state: State, known: Peer, now: float) -> bool:
    told = state.breaks.get(known.peer)
    silence = now - max(state.last_seen[known.peer].at, state.started_at, told.at if told else 0.0)
    return silence > _seconds(state, _SILENT_HEARTBEATS)


def _has_anchors(state: State, holder: Member | ReservedAssignment) -> bool:
    """Whether the peer has attested the anchors from which the current round starts."""
    rounds, before = state.synced.get(holder.peer, {}), state.current_round - 1
    is_here = all(rounds.get(stage, -1) >= before for stage in holder.stages)
    return is_here and is_synced(state, holder, state.current_round)


def _spares(state: State, taken: set[PeerId], now: float) -> list[ReservedAssignment]:
    """The peers that could take a seat at once, in the order in which they are asked."""
    assigned = state.assignments[state.epoch]
    return [
        each
        for peer, each in sorted(state.reservations.items())
        if peer not in assigned
        and peer not in taken
        and not _is_silent(state, state.peers[peer], now)
        and member_obstacle(state, each, state.current_round) is None
        and _has_anchors(state, each)
    ]


def _change(former: Replica, repaired: Replica) -> str:
    """What changes, such as "replica-2 with ..cd for ..ab (stage 1) from step 6 of the round on"."""
    pairs = zip(former.members, repaired.members, strict=True)
    changes = [
        f"{short(new.peer)} for {short(old.peer)} ({stages_of(new)})"
        for old, new in pairs
        if new.peer != old.peer
    ]
    who = f"with {listed(changes)}" if changes else "with new links"
    return f"{repaired.name} {who} from step {repaired.resumes_at + 1} on"
