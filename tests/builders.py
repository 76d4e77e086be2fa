"""Builders that many tests share: run specifications, peers with real keys, the status of a run."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from coordinator.run.state.commands import Join
from coordinator.run.state.events import Event, RoundDecided
from coordinator.status.run_status import replica_figures
from protocol.run_files.resolve import resolve
from protocol.spec.run import RunSpec
from protocol.status import (
    Cause,
    CauseCode,
    Measurement,
    PeerStatus,
    ReplicaState,
    ReplicaStatus,
    RunPhase,
    RunStatus,
)
from protocol.trust.envelope import peer_id_of, sign_descriptor
from protocol.types import (
    PROTOCOL_VERSION,
    Capacity,
    Decision,
    Estimates,
    Lifecycle,
    PayloadDescriptor,
    PeerId,
    Role,
)
from tests.support.paths import ROOT


@dataclass(frozen=True)
class Keyed:
    """A peer with a key of its own, the same for the same number."""

    number: int
    key: Ed25519PrivateKey = field(repr=False, compare=False)

    @cached_property
    def peer(self) -> PeerId:
        return peer_id_of(self.key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw))

    def sign(self, message: bytes) -> bytes:
        return self.key.sign(message)

    def join(
        self,
        spec: RunSpec,
        role: Role = Role.REPLICA,
        endpoint: str = "127.0.0.1:9",
        memory_bytes: int = 2**30,
    ) -> Join:
        return Join(PROTOCOL_VERSION, spec.hash, self.peer, role, Capacity("cpu", memory_bytes, 1), endpoint)

    def payload(
        self,
        spec: RunSpec,
        stage: int,
        round_number: int,
        anchor: str | None = None,
        weight: float = 1.0,
        run: str = "",
        epoch: int = 1,
        content: bytes = b"",
    ) -> PayloadDescriptor:
        """A signed descriptor. By default all peers agree on the anchor of a (stage, round).

        `run`: "" is the run of `spec` without an authority. `content`: b"" is that of no other payload.
        """
        content = content or f"{self.number} {stage} {round_number}".encode()
        unsigned = PayloadDescriptor(
            run=run or spec.name,
            stage=stage,
            round_number=round_number,
            owner=self.peer,
            anchor_digest=anchor or anchor_of(stage, round_number - 1),
            codec="sparse",
            weight=weight,
            nbytes=100,
            sha256=hashlib.sha256(content).hexdigest(),
            epoch=epoch,
        )
        return sign_descriptor(unsigned, self.key.sign)


@cache
def keyed(number: int) -> Keyed:
    """The same for the same number: tests ask 200,000 times for some thousand peers."""
    seed = hashlib.sha256(f"test peer {number}".encode()).digest()
    return Keyed(number, Ed25519PrivateKey.from_private_bytes(seed))


def anchor_of(stage: int, round_number: int) -> str:
    """The digest that every honest peer attests after `round_number`."""
    return hashlib.sha256(f"anchor {stage} {round_number}".encode()).hexdigest()


def spec_of(
    stages: int = 2, replicas: int = 2, pipelines: int = 0, rounds: int = 3, **overrides: Any
) -> RunSpec:
    """`overrides` as "section__field"."""
    return resolve(
        "nano",
        overrides={
            "rounds": rounds,
            "swarm.stages": stages,
            "swarm.replicas": replicas,
            "swarm.pipelines": pipelines,
            "model.layers": max(4, stages),
            **{name.replace("__", "."): value for name, value in overrides.items()},
        },
    )


def tampered(descriptor: PayloadDescriptor) -> PayloadDescriptor:
    """The same envelope around other bytes, under the old signature."""
    return replace(descriptor, sha256="0" * 64)


def status_of(
    round_number: int = 2,
    inner_step: int = 1,
    estimates: Estimates | None = None,
    measurements: Sequence[Measurement] = (),
    **spec: Any,
) -> RunStatus:
    """The status of a run with one peer, which trains; `spec` as for :func:`spec_of`."""
    found = replica_figures(measurements)
    peer = PeerStatus(
        peer=keyed(0).peer,
        role=Role.REPLICA,
        lifecycle=Lifecycle.TRAINING,
        round_number=round_number,
        inner_step=inner_step,
        seconds_since_seen=1.5,
        assignment="replica-0, stages 0-1",
        estimates=estimates or Estimates(Capacity("cpu", 2**30, 1)),
        problem="nothing answers at its address",
        role_reason="it carries the whole model",
    )
    return RunStatus(
        run=spec_of(**spec).name,
        spec=spec_of(**spec),
        phase=RunPhase.TRAINING,
        cause=Cause(CauseCode.TRAINING, round_number=2, total=3),
        rounds_decided=1,
        stage_rounds_committed=3,
        stage_rounds_aborted=1,
        peers=(peer,),
        replicas=tuple(
            ReplicaStatus(index, ReplicaState.TRAINS, (), is_planned=True, figures=each)
            for index, each in found.items()
        ),
        measurements=tuple(measurements),
        plan=None,
        anchors_agree=True,
        time=1.7e9,
    )


def decisions_in(events: Iterable[Event], kind: Any = Decision) -> list[Any]:
    """The decisions of one kind among `events`, in their order."""
    decisions = [each.decision for each in events if isinstance(each, RoundDecided)]
    return [each for each in decisions if isinstance(each, kind)]


@cache
def former_log() -> list[tuple[str, str]]:
    """Kind and JSON of each event of a whole run, as the first release of the log format wrote them.

    Two full replicas, a pipeline and two spares train four rounds. Every kind of that release occurs.
    """
    lines = (ROOT / "tests" / "vectors" / "event_log.tsv").read_text("utf-8").splitlines()
    return [(kind, text) for kind, text in (line.split("\t") for line in lines)]
