"""What the coordinator answers to a command: ``decide(state, command, now) -> events | refusal``.

Pure: the clock is an argument, and the same state, command and time always give the same outcome. The rules
of a round are in coordinator.rounds, those of the anchors in coordinator.anchors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias, assert_never

from coordinator.anchors import attest, has_attested_last, unconfirmed
from coordinator.events import (
    CoordinatorStarted,
    Event,
    PeerBanned,
    PeerJoined,
    PeerLeft,
    PeerLost,
    PeerSeen,
    PeerUnbanned,
    PlanAdopted,
    RunFinished,
)
from coordinator.grouping import Waiting, group, missing, needed
from coordinator.invites import create, enroll, permitted_role, revoke
from coordinator.rounds import advance, offer, report, withhold
from coordinator.screens import bad_request, check_welcome, live_peer
from coordinator.state import Draft, Peer, Phase, State
from protocol.envelope import public_key_of
from protocol.errors import ErrorCode, HetnodeError
from protocol.spec import RunSpec
from protocol.types import PROTOCOL_VERSION, Capacity, PayloadDescriptor, PeerId, Plan, Rejection, Role

FINISHED = "finished"
"""The reason with which a peer leaves whose work is done."""


@dataclass(frozen=True)
class Start:
    """The coordinator begins to listen, for the first time or again."""


@dataclass(frozen=True)
class Join:
    protocol_version: int
    spec_hash: str
    peer: PeerId
    role: Role
    capacity: Capacity
    endpoint: str


@dataclass(frozen=True)
class CreateInvite:
    """`secret_sha256` in hex; `valid_seconds` from now on; `role` None for any."""

    invite: str
    secret_sha256: str
    uses: int
    valid_seconds: float
    role: Role | None


@dataclass(frozen=True)
class RevokeInvite:
    invite: str


@dataclass(frozen=True)
class Enroll:
    """A peer that has proved its identity asks for a certificate. Once enrolled it needs no invite: ""."""

    peer: PeerId
    invite: str
    secret_sha256: str


@dataclass(frozen=True)
class Ban:
    peer: PeerId
    reason: str


@dataclass(frozen=True)
class Unban:
    peer: PeerId


@dataclass(frozen=True)
class Leave:
    peer: PeerId
    reason: str


@dataclass(frozen=True)
class Heartbeat:
    peer: PeerId
    round: int
    inner_step: int


@dataclass(frozen=True)
class Offer:
    peer: PeerId
    descriptor: PayloadDescriptor


@dataclass(frozen=True)
class Await:
    """A peer waits for a decision to which it does not contribute."""

    peer: PeerId
    stage: int
    round: int


@dataclass(frozen=True)
class Report:
    peer: PeerId
    stage: int
    round: int
    held: tuple[PayloadDescriptor, ...]
    rejected: tuple[Rejection, ...] = ()


@dataclass(frozen=True)
class Attest:
    peer: PeerId
    stage: int
    round: int
    part: str
    digest: str


@dataclass(frozen=True)
class Tick:
    """Time has passed: silent peers are lost, windows close, deadlines fall."""


Command: TypeAlias = (
    Start
    | CreateInvite
    | RevokeInvite
    | Enroll
    | Ban
    | Unban
    | Join
    | Leave
    | Heartbeat
    | Offer
    | Await
    | Report
    | Attest
    | Tick
)


@dataclass(frozen=True)
class Outcome:
    """The events of a command, recorded in any case, and the refusal that its sender is told, if any."""

    events: tuple[Event, ...]
    refusal: HetnodeError | None = None


def decide(state: State, spec: RunSpec, command: Command, now: float) -> Outcome:
    """What `command` leads to at time `now` (seconds, on the clock of the recorded events). Never raises."""
    draft = Draft(state)
    try:
        _obey(draft, spec, command, now)
    except HetnodeError as refusal:
        return Outcome(tuple(draft.events), refusal)
    return Outcome(tuple(draft.events))


def check_compatible(spec: RunSpec, protocol_version: int, spec_hash: str) -> None:
    """Refuse a peer that cannot take part, before anything else it says is looked at.

    Raises:
        HetnodeError: VERSION_MISMATCH with both versions; SPEC_MISMATCH with both hashes, in full.
    """
    if protocol_version != PROTOCOL_VERSION:
        raise HetnodeError(
            ErrorCode.VERSION_MISMATCH,
            f"This coordinator speaks protocol version {PROTOCOL_VERSION}, the node {protocol_version}.",
            "Install the same version of hetnode on both.",
        )
    if spec_hash not in ("", spec.hash):
        raise HetnodeError(
            ErrorCode.SPEC_MISMATCH,
            f"This run has the specification {spec.hash}, the node has {spec_hash}.",
            "Join with a fresh run folder, or with the coordinator of that other run.",
        )


def _obey(draft: Draft, spec: RunSpec, command: Command, now: float) -> None:  # noqa: PLR0912
    match command:
        case Start():
            draft.add(CoordinatorStarted(now))
        case CreateInvite():
            create(
                draft,
                command.invite,
                command.secret_sha256,
                command.uses,
                command.valid_seconds,
                command.role,
                now,
            )
        case RevokeInvite():
            revoke(draft, command.invite, now)
        case Enroll():
            check_welcome(draft.state, command.peer)
            enroll(draft, command.peer, command.invite, command.secret_sha256, now)
        case Ban():
            _ban(draft, spec, command, now)
        case Unban():
            if command.peer in draft.state.banned or command.peer in draft.state.quarantined:
                draft.add(PeerUnbanned(now, command.peer))
        case Join():
            _join(draft, spec, command, now)
        case Heartbeat():
            live_peer(draft.state, command.peer)
            draft.add(PeerSeen(now, command.peer, command.round, command.inner_step))
        case Leave():
            _leave(draft, spec, command, now)
        case Offer():
            offer(draft, spec, command.peer, command.descriptor, now)
        case Await():
            withhold(draft, spec, command.peer, command.stage, command.round, now)
        case Report():
            _report(draft, spec, command, now)
        case Attest():
            _attest(draft, spec, command, now)
        case Tick():
            _tick(draft, spec, now)
        case _:
            assert_never(command)


def _join(draft: Draft, spec: RunSpec, command: Join, now: float) -> None:
    check_compatible(spec, command.protocol_version, command.spec_hash)
    _check_peer_id(command.peer)
    check_welcome(draft.state, command.peer)
    permitted = permitted_role(draft.state, command.peer)
    if permitted not in (None, command.role):
        raise bad_request(f"the invite of {command.peer} is for the role {permitted}, not {command.role}")
    former = draft.state.peers.get(command.peer)
    if former is not None and former.is_live:
        if _is_repeated(draft.state, former, command):
            return
        raise HetnodeError(
            ErrorCode.ALREADY_ACTIVE,
            f"Peer {command.peer} takes part already.",
            "Stop the other node of this identity; if it has just died, "
            f"try again in {spec.timing.lost_after:g} s.",
        )
    if draft.state.phase is not Phase.GATHERING:
        over = draft.state.phase is Phase.FINISHED
        raise HetnodeError(
            ErrorCode.RUN_STARTED,
            f"The run {'has finished' if over else 'has already started'}.",
            "This version takes in no peer after the start; join before it, or start another run.",
        )
    _require_room(draft.state, spec, command)
    draft.add(PeerJoined(now, command.peer, command.role, command.capacity, command.endpoint))
    plan = group(draft.state.peers.values(), spec, epoch=1, from_round=1, first_sample=0)
    if isinstance(plan, Plan):
        draft.add(PlanAdopted(now, plan))


def _check_peer_id(peer: PeerId) -> None:
    try:
        public_key_of(peer)
    except ValueError as error:
        raise bad_request(str(error)) from None


def _ban(draft: Draft, spec: RunSpec, command: Ban, now: float) -> None:
    _check_peer_id(command.peer)
    if command.peer in draft.state.banned:
        return
    draft.add(PeerBanned(now, command.peer, command.reason))
    known = draft.state.peers.get(command.peer)
    if known is not None and known.is_live:
        draft.add(PeerLeft(now, command.peer, f"banned: {command.reason}", finished=False))
        _advance_all(draft, spec, now)


def _is_repeated(state: State, former: Peer, command: Join) -> bool:
    """Whether this is the same join once more, after its answer was lost: no heartbeat has followed it."""
    same = (former.role, former.capacity, former.endpoint) == (
        command.role,
        command.capacity,
        command.endpoint,
    )
    return same and not state.pulses[former.peer].beating


def _require_room(state: State, spec: RunSpec, command: Join) -> None:
    peers = list(state.peers.values())
    total = needed(spec)[command.role]
    if sum(peer.is_live and peer.role is command.role for peer in peers) < total:
        return
    short = missing(peers, spec)
    waiting = group(peers, spec, 1, 1, 0)
    if not short and command.endpoint and isinstance(waiting, Waiting) and waiting.unreachable:
        return  # the one peer more that lets two others be connected
    raise HetnodeError(
        ErrorCode.RUN_FULL,
        f"The run takes {total} peer{'' if total == 1 else 's'} of role {command.role.value} "
        f"and has them; it still waits for {short or 'a stage peer with an endpoint'}.",
        "Join in a role that is missing, or start the run with more replicas or pipelines.",
    )


def _leave(draft: Draft, spec: RunSpec, command: Leave, now: float) -> None:
    known = draft.state.peers.get(command.peer)
    if known is not None and not known.is_live:
        return
    live_peer(draft.state, command.peer)
    finished = command.reason == FINISHED and has_attested_last(draft.state, spec, command.peer)
    draft.add(PeerLeft(now, command.peer, command.reason, finished))
    _advance_all(draft, spec, now)


def _report(draft: Draft, spec: RunSpec, command: Report, now: float) -> None:
    held, rejected = command.held, command.rejected
    report(draft, spec, command.peer, command.stage, command.round, held, rejected, now)


def _attest(draft: Draft, spec: RunSpec, command: Attest, now: float) -> None:
    attest(draft, spec, command.peer, command.stage, command.round, command.part, command.digest, now)
    _finish(draft, spec, now)


def _tick(draft: Draft, spec: RunSpec, now: float) -> None:
    started_at = draft.state.started_at
    for peer in draft.state.peers.values():
        silent = now - max(draft.state.pulses[peer.peer].seen, started_at)
        if peer.is_live and silent > spec.timing.lost_after:
            draft.add(PeerLost(now, peer.peer, silent))
    _advance_all(draft, spec, now)


def _advance_all(draft: Draft, spec: RunSpec, now: float) -> None:
    """A gone peer is waited for no longer, at any stage."""
    for stage in range(spec.swarm.stages):
        advance(draft, spec, stage, now)
    _finish(draft, spec, now)


def _finish(draft: Draft, spec: RunSpec, now: float) -> None:
    state = draft.state
    all_decided = state.current_round > spec.rounds
    if state.phase is Phase.TRAINING and all_decided and not unconfirmed(state, spec):
        draft.add(RunFinished(now))
