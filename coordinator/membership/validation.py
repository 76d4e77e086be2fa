"""Checks of commands before their rules. Each raises a HetnodeError."""

from __future__ import annotations

from coordinator.run.state.records import Peer
from coordinator.run.state.state import State
from protocol.errors import ErrorCode, HetnodeError
from protocol.spec.fixed import LEAST_SHARE
from protocol.spec.run import RunSpec
from protocol.status import RunPhase
from protocol.trust.envelope import is_authentic, public_key_of
from protocol.types import PayloadDescriptor, PeerId

_ROUNDING = 1e-9
"""Relative tolerance of the least weight: both ends of the comparison are rounded products."""


def check_not_excluded(state: State, peer: PeerId) -> None:
    """Raises BANNED or QUARANTINED if `peer` is excluded from the run."""
    reason = state.banned.get(peer)
    if reason is not None:
        raise HetnodeError(
            ErrorCode.BANNED,
            f"Peer {peer} is banned from this run: {reason or 'no reason was given'}.",
            "Only the operator of the run can lift the ban.",
        )
    if peer in state.quarantined:
        rounds = ", ".join(map(str, state.strikes.get(peer, ())))
        raise HetnodeError(
            ErrorCode.QUARANTINED,
            f"Peer {peer} is in quarantine: the others could not use its payloads of rounds {rounds}.",
            "The coordinator's log has the reasons; the operator can end it with 'hetnode peers unban'.",
        )


def check_not_finished(state: State) -> None:
    """Raises RUN_STARTED if the run is over."""
    if state.phase is RunPhase.FINISHED:
        raise HetnodeError(
            ErrorCode.RUN_STARTED, "The run has finished.", "Join another run, or start one in a new folder."
        )


def check_peer_id(peer: PeerId) -> None:
    """Raises BAD_REQUEST if `peer` is not a peer id."""
    try:
        public_key_of(peer)
    except ValueError as error:
        raise bad_request(str(error)) from None


def live_peer(state: State, peer: PeerId) -> Peer:
    """The record of `peer`. Raises BANNED, QUARANTINED, or UNKNOWN_PEER if it has not joined or is gone."""
    # An excluded peer is gone, too. It must not learn to join again.
    check_not_excluded(state, peer)
    known = state.peers.get(peer)
    if known is not None and known.is_live:
        return known
    cause = "has left or was silent for too long" if known else "has not joined this run"
    raise HetnodeError(
        ErrorCode.UNKNOWN_PEER,
        f"Peer {peer} {cause}.",
        "Join again; its assignment stays reserved until another peer takes it.",
    )


def check_host(state: State, peer: PeerId, stage: int, round_number: int) -> None:
    """Raises BAD_REQUEST unless the round is open or decided, and `peer` hosts `stage` in it.

    COORDINATOR_BEHIND for a round that follows one that is not decided.
    """
    current, rounds = state.current_round, state.spec.rounds
    if current < round_number <= rounds and not state.is_decided(stage, round_number - 1):
        raise behind(peer, round_number - 1, current)
    if state.phase is RunPhase.GATHERING or not 1 <= round_number <= min(current, rounds):
        raise bad_request(f"round {round_number} is not open; the run is in round {current} of {rounds}")
    assignment = state.assignment(peer, round_number)
    if assignment is None or stage not in assignment.member.stages:
        raise bad_request(f"{peer} does not host stage {stage} in round {round_number}")


def behind(peer: PeerId, known: int, current: int) -> HetnodeError:
    """COORDINATOR_BEHIND: `peer` knows a decision of round `known`, which is `current` or a later one."""
    return HetnodeError(
        ErrorCode.COORDINATOR_BEHIND,
        f"{peer} knows the decision of round {known}, and this coordinator is in round {current}: its folder "
        "was restored from an older copy.",
        "The node waits. Stop the coordinator and restore the newest copy of its whole folder, or let it go "
        "on from what nodes hold: 'hetnode rollback' shows that.",
    )


def unknown_round(round_number: int) -> HetnodeError:
    return HetnodeError(
        ErrorCode.COORDINATOR_BEHIND,
        f"This coordinator has no decision of round {round_number}: it was restored from an older copy, and "
        "went on from what its nodes held after a later round.",
        "No action is needed: nodes load the anchors of that round.",
    )


def bad_request(cause: str) -> HetnodeError:
    return HetnodeError(
        ErrorCode.BAD_REQUEST,
        f"The coordinator refuses this: {cause}.",
        "Update the program of the peer that sent this; if it is the newest, it has a fault.",
    )


def check_run(state: State, descriptor: PayloadDescriptor) -> None:
    """Raises BAD_REQUEST for a descriptor of another run, which says nothing about its owner in this one."""
    if descriptor.run != state.run:
        raise bad_request(
            f"the payload of {descriptor.owner} belongs to run {descriptor.run}, not {state.run}"
        )


def check_descriptor(state: State, descriptor: PayloadDescriptor) -> None:
    """Check a descriptor whose owner hosts the stage, except for its anchor. Raises BAD_REQUEST."""
    check_run(state, descriptor)
    owner, newest = descriptor.owner, state.plan_for(descriptor.round_number).epoch
    if not 1 <= descriptor.epoch <= newest:
        raise bad_request(f"the payload of {owner} is of plan {descriptor.epoch}, the newest is {newest}")
    assignment = state.assignment(owner, descriptor.round_number)
    assert assignment is not None, "only hosts of the stage get this far"
    assigned = assignment.replica.weight
    least = LEAST_SHARE * assigned  # a replica that has done less waits for the next round
    if not least * (1 - _ROUNDING) <= descriptor.weight <= assigned:
        raise bad_request(
            f"the payload of {owner} has weight {descriptor.weight}, it may have {least:g} to {assigned}"
        )
    most = max_payload_bytes(state.spec)
    if not 0 < descriptor.nbytes <= most:
        raise bad_request(f"the payload of {owner} has {descriptor.nbytes} bytes, at most {most}")
    if not is_authentic(descriptor, state.run):  # last, because verifying a signature is the slowest check
        raise bad_request(f"the payload of {owner} is not signed by it")


def max_payload_bytes(spec: RunSpec) -> int:
    """An upper bound: each parameter of the whole model as a float32 value with an int32 index."""
    return 8 * spec.parameters + 2**20  # headers
