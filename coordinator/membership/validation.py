"""Checks that come before any rule of the run. Each raises a HetnodeError."""

from __future__ import annotations

from coordinator.state.state import Assignment, Peer, State
from protocol.errors import ErrorCode, HetnodeError
from protocol.spec.run import RunSpec
from protocol.status import RunPhase
from protocol.trust.envelope import is_authentic, public_key_of
from protocol.types import PayloadDescriptor, PeerId

_ROUNDING = 1e-9


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
            f"Peer {peer} is in quarantine: what it sent in rounds {rounds} could not be used.",
            "The coordinator's log has the reasons; the operator can lift it with 'hetnode peers unban'.",
        )


def check_peer_id(peer: PeerId) -> None:
    """Raises BAD_REQUEST where `peer` is not a peer id."""
    try:
        public_key_of(peer)
    except ValueError as error:
        raise bad_request(str(error)) from None


def live_peer(state: State, peer: PeerId) -> Peer:
    """The record of `peer`. Raises BANNED, QUARANTINED, or UNKNOWN_PEER if it has not joined or is gone."""
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


def host_of(state: State, spec: RunSpec, peer: PeerId, stage: int, round_number: int) -> Assignment:
    """The assignment of `peer` as host of `stage` in an open or decided round. Raises BAD_REQUEST."""
    if state.phase is RunPhase.GATHERING or not 1 <= round_number <= min(state.current_round, spec.rounds):
        raise bad_request(
            f"round {round_number} is not open; the run is in round {state.current_round} of {spec.rounds}"
        )
    assignment = state.assignment(peer, round_number)
    if assignment is None or stage not in assignment.member.stages:
        raise bad_request(f"{peer} does not host stage {stage} in round {round_number}")
    return assignment


def bad_request(cause: str) -> HetnodeError:
    return HetnodeError(
        ErrorCode.BAD_REQUEST,
        f"The coordinator refuses this: {cause}.",
        "Run the same version of hetnode on every peer; if they already do, that peer is faulty.",
    )


def check_descriptor(state: State, spec: RunSpec, descriptor: PayloadDescriptor) -> None:
    """Check everything in a descriptor but the anchor. Its owner hosts the stage. Raises BAD_REQUEST."""
    owner = descriptor.owner
    if descriptor.run != spec.run_id:
        raise bad_request(f"the payload of {owner} belongs to run {descriptor.run}, not {spec.run_id}")
    assignment = state.assignment(owner, descriptor.round_number)
    assert assignment is not None, "only hosts of the stage get this far"
    assigned = assignment.replica.weight
    least = spec.recovery.least_share * assigned
    if not least * (1 - _ROUNDING) <= descriptor.weight <= assigned:
        raise bad_request(
            f"the payload of {owner} has weight {descriptor.weight}, it may have {least:g} to {assigned}"
        )
    most = max_payload_bytes(spec)
    if not 0 < descriptor.nbytes <= most:
        raise bad_request(f"the payload of {owner} has {descriptor.nbytes} bytes, at most {most}")
    if not is_authentic(descriptor):
        raise bad_request(f"the payload of {owner} is not signed by it")


def max_payload_bytes(spec: RunSpec) -> int:
    """An upper bound: every parameter of the whole model as a float32 value with an int32 index."""
    model = spec.model
    per_layer = 4 * model.width**2 + 3 * model.width * model.feed_forward + 2 * model.width
    parameters = 2 * model.vocabulary * model.width + model.layers * per_layer + model.width
    return 8 * parameters + 2**20
