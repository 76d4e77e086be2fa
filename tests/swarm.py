"""Peers with real keys, and the commands and calls that a test makes in their name."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from coordinator.commands import Command, Join
from coordinator.events import Event
from coordinator.history import apply
from coordinator.state import State
from coordinator.transition import Outcome, decide
from protocol.envelope import peer_id_of, sign_descriptor
from protocol.errors import ErrorCode, HetnodeError
from protocol.spec import RunSpec, resolve
from protocol.types import PROTOCOL_VERSION, Capacity, PayloadDescriptor, PeerId, Role


@dataclass(frozen=True)
class Keyed:
    """A peer with a key of its own, the same for the same number."""

    number: int
    key: Ed25519PrivateKey = field(repr=False, compare=False)

    @property
    def peer(self) -> PeerId:
        return peer_id_of(self.key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw))

    def sign(self, message: bytes) -> bytes:
        return self.key.sign(message)

    def join(self, spec: RunSpec, role: Role = Role.REPLICA, endpoint: str = "127.0.0.1:9") -> Join:
        return Join(PROTOCOL_VERSION, spec.hash, self.peer, role, Capacity("cpu", 2**30, 1), endpoint)

    def payload(
        self, spec: RunSpec, stage: int, round: int, anchor: str | None = None, weight: float = 1.0
    ) -> PayloadDescriptor:
        """A signed descriptor. By default all peers agree on the anchor of a (stage, round)."""
        content = f"{self.number} {stage} {round}".encode()
        unsigned = PayloadDescriptor(
            run=spec.run_id,
            stage=stage,
            round=round,
            owner=self.peer,
            anchor_digest=anchor or anchor_of(stage, round - 1),
            codec="sparse",
            weight=weight,
            nbytes=100,
            sha256=hashlib.sha256(content).hexdigest(),
        )
        return sign_descriptor(unsigned, self.key.sign)


def keyed(number: int) -> Keyed:
    seed = hashlib.sha256(f"test peer {number}".encode()).digest()
    return Keyed(number, Ed25519PrivateKey.from_private_bytes(seed))


def anchor_of(stage: int, round: int) -> str:
    """The digest that every honest peer attests after `round`."""
    return hashlib.sha256(f"anchor {stage} {round}".encode()).hexdigest()


def spec_of(stages: int = 2, replicas: int = 2, pipelines: int = 0, rounds: int = 3) -> RunSpec:
    return resolve(
        "nano",
        overrides={
            "rounds": rounds,
            "swarm.stages": stages,
            "swarm.replicas": replicas,
            "swarm.pipelines": pipelines,
        },
    )


class Run:
    """A coordinator without IO: commands go in, events are applied and kept, time moves when told to."""

    def __init__(self, spec: RunSpec) -> None:
        self.spec = spec
        self.state = State.of(spec)
        self.events: list[Event] = []
        self.now = 1000.0

    def send(self, command: Command) -> Outcome:
        outcome = decide(self.state, self.spec, command, self.now)
        for event in outcome.events:
            self.happens(event)
        return outcome

    def happens(self, event: Event) -> None:
        self.state = apply(self.state, event)
        self.events.append(event)

    def does(self, command: Command) -> tuple[Event, ...]:
        """The events of a command that must not be refused."""
        outcome = self.send(command)
        assert outcome.refusal is None, outcome.refusal
        return outcome.events

    def refuses(self, command: Command, code: ErrorCode) -> HetnodeError:
        """The refusal of a command, which must leave the state as it was, but for strikes and divergence."""
        before = self.state
        refusal = self.send(command).refusal
        assert refusal is not None, command
        assert refusal.code is code
        unstruck = replace(self.state, strikes=before.strikes)
        assert unstruck == before or code is ErrorCode.ANCHOR_DIVERGED
        return refusal


def tampered(descriptor: PayloadDescriptor) -> PayloadDescriptor:
    """The same envelope around other bytes, under the old signature."""
    return replace(descriptor, sha256="0" * 64)
