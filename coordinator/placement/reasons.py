"""Says why a plan differs from the one before: who joins, returns, moves or is left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from coordinator.base.phrases import listed, member_text, short, stages_of
from coordinator.placement.rules import are_parted, has_moved, member_obstacle
from coordinator.run.state.records import Peer
from coordinator.run.state.state import State
from protocol.types import Replica, ReservedAssignment


def reasons_of(
    state: State,
    kept: Mapping[int, Replica],
    rebuilt: Mapping[int, Sequence[ReservedAssignment]],
    from_round: int,
) -> list[str]:
    """Sentences for the replicas that join, return or are left out, and why."""
    newest = {replica.index: replica for replica in state.plans[-1].replicas}
    changes, roles = list[str](), list[str]()
    for index, chain in sorted(rebuilt.items()):
        replaced = _replacements(state, chain, from_round)
        members = {member.peer for member in newest[index].members} if index in newest else set()
        change = "returns" if index in state.assigned_replicas else "joins"
        if replaced and not members.isdisjoint(reservation.peer for reservation in chain):
            change = "goes on"  # some of its members stay
        changes.append(f"replica-{index} {change}{f' with {listed(replaced)}' if replaced else ''}")
        peers = (state.peers[reservation.peer] for reservation in chain)
        roles += [_new_role(each) for each in peers if each.role_changes and each.peer not in members]
    left_out: dict[str, list[str]] = {}
    for index, replica in newest.items():
        if index not in kept and index not in rebuilt:
            left_out.setdefault(_why_left_out(state, replica), []).append(replica.name)
    return [
        *([listed(changes)] if changes else []),
        *roles,
        *(f"goes on without {listed(names)}, {why}" for why, names in left_out.items()),
        *_moves(newest, kept),
    ]


def _new_role(peer: Peer) -> str:
    return f"{short(peer.peer)} is a {peer.policy.noun} now: {peer.role_reason}"


def _moves(newest: Mapping[int, Replica], kept: Mapping[int, Replica]) -> list[str]:
    """For each member that has another endpoint than in the newest plan, such as "..ab is at h:1 now"."""
    return [
        f"{short(now.peer)} {f'is at {now.endpoint} now' if now.endpoint else 'only dials now'}"
        for index, replica in kept.items()
        for before, now in zip(newest[index].members, replica.members, strict=True)
        if before != now
    ]


def _replacements(state: State, chain: Sequence[ReservedAssignment], from_round: int) -> list[str]:
    """For each member that is new at its position, such as "..ab for ..cd (stage 1), which is gone"."""
    holders = {reservation.slot: reservation for reservation in state.reservations.values()}
    found = []
    for reservation in chain:
        holder = holders.get(reservation.slot)
        if holder is None:
            found.append(f"{short(reservation.peer)} in a vacancy ({stages_of(reservation)})")
        elif holder.peer != reservation.peer:
            why = member_obstacle(state, holder, from_round)
            former = member_text(why) if why else f"{short(holder.peer)} ({stages_of(holder)})"
            found.append(f"{short(reservation.peer)} for {former}")
    return found


def _why_left_out(state: State, replica: Replica) -> str:
    members = [state.peers[member.peer] for member in replica.members]
    if are_parted(state, replica.members):
        return "whose members are apart because they deliver nothing together"
    if moved := [each for each in replica.members if has_moved(state, replica, each)]:
        return f"since {_new_role(state.peers[moved[0].peer])}"
    if any(each.is_lost for each in members):
        return "which lost a member"
    return "which must catch up" if all(each.is_staying for each in members) else "of which a member drains"
