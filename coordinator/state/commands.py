"""Commands of peers, the operator and the clock to the coordinator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from protocol.types import Capacity, Estimates, PayloadDescriptor, PeerId, Rejection, Role


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
    """`secret_sha256` is in hex, `valid_seconds` count from now, and `role` None permits any role."""

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
    """A peer that has proved its identity asks for a certificate. An enrolled peer needs no `invite`: ""."""

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
class Drain:
    """`peer` wants to leave at the end of its round."""

    peer: PeerId
    reason: str


@dataclass(frozen=True)
class Retreat:
    """`peer` cannot train under the plan of `epoch`, for example after two members lost their link."""

    peer: PeerId
    epoch: int
    reason: str


@dataclass(frozen=True)
class Heartbeat:
    """`estimates` is None if they have not changed."""

    peer: PeerId
    round_number: int
    inner_step: int
    estimates: Estimates | None = None


@dataclass(frozen=True)
class Offer:
    peer: PeerId
    descriptor: PayloadDescriptor


@dataclass(frozen=True)
class Await:
    """A peer waits for a decision without contributing a payload.

    `withheld` is the epoch of the plan under which it hosts the stage but offers no payload; 0 if it only
    asks.
    """

    peer: PeerId
    stage: int
    round_number: int
    withheld: int = 0


@dataclass(frozen=True)
class Report:
    peer: PeerId
    stage: int
    round_number: int
    held: tuple[PayloadDescriptor, ...]
    rejected: tuple[Rejection, ...] = ()


@dataclass(frozen=True)
class Attest:
    peer: PeerId
    stage: int
    round_number: int
    part: str
    digest: str


@dataclass(frozen=True)
class Tick:
    """Time has passed: silent peers are lost, groups are closed, rounds are decided."""


Command: TypeAlias = (
    Start
    | CreateInvite
    | RevokeInvite
    | Enroll
    | Ban
    | Unban
    | Join
    | Leave
    | Drain
    | Retreat
    | Heartbeat
    | Offer
    | Await
    | Report
    | Attest
    | Tick
)
