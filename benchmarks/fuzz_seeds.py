"""Valid records and messages: the first inputs of :mod:`benchmarks.fuzz`."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, derive_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from google.protobuf.message import Message

from coordinator.authority import Authority, open_authority
from protocol.errors import HetnodeError
from protocol.pb import hetnode_pb2 as pb
from protocol.run_files.resolve import resolve
from protocol.status import Cause, CauseCode, RunPhase, RunStatus
from protocol.trust import envelope
from protocol.types import PROTOCOL_VERSION
from protocol.wire.convert.payloads import descriptor_from_pb, descriptor_to_pb
from protocol.wire.status import status_to_pb

DAY = 86400.0

SPEC = resolve("nano", overrides={"swarm.stages": 2, "swarm.replicas": 1, "swarm.pipelines": 1})
TLS_KEY = derive_private_key(7, SECP256R1()).public_key()
_KEYS = [Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32) for number in range(3)]
PEERS = [envelope.peer_id_of(key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)) for key in _KEYS]
PEER = PEERS[0]


@dataclass(frozen=True)
class Target:
    """A decoder.

    Attributes:
        seeds: inputs of which at least one is valid.
        message: the type of the inputs if they are messages: then their fields are changed, too.
        is_entry_point: of the DHT or of a link.
    """

    name: str
    decode: Callable[[bytes], object]
    seeds: tuple[bytes, ...]
    message: type[Message] | None = None
    is_entry_point: bool = False

    @staticmethod
    def is_refusal(error: Exception) -> bool:
        return isinstance(error, HetnodeError)


def stream_of(messages: Sequence[bytes]) -> bytes:
    """Messages of a stream as one input: the length of each in two bytes, then the message."""
    return b"".join(len(message).to_bytes(2, "little") + message for message in messages)


def messages_in(data: bytes) -> list[bytes]:
    """The inverse of :func:`stream_of`, for any bytes."""
    found = []
    while data:
        size = int.from_bytes(data[:2], "little")
        found.append(data[2 : 2 + size])
        data = data[2 + size :]
    return found


def _authority() -> Authority:
    with tempfile.TemporaryDirectory() as folder:
        return open_authority(Path(folder), "run", seconds=365 * DAY)


AUTHORITY = _authority()


def sign(message: bytes, number: int = 0) -> bytes:
    """Sign with the key of PEERS[number]."""
    return _KEYS[number].sign(message)


def der(pem: bytes) -> bytes:
    return x509.load_pem_x509_certificate(pem).public_bytes(Encoding.DER)


def descriptor_of(stage: int, number: int = 0, anchor: str = "a" * 64) -> pb.PayloadDescriptor:
    """A signed descriptor of round 1, by PEERS[number]."""
    unsigned = pb.PayloadDescriptor(
        run=SPEC.name,
        stage=stage,
        round=1,
        owner=PEERS[number],
        anchor_digest=anchor,
        codec="codec",
        weight=1.0,
        nbytes=100,
        sha256=f"{number}" * 64,
        epoch=1,
    )
    signed = envelope.sign_descriptor(descriptor_from_pb(unsigned), lambda message: sign(message, number))
    return descriptor_to_pb(signed)


CONTRIBUTION = pb.PeerRecord(
    peer=PEER,
    protocol_version=PROTOCOL_VERSION,
    role="replica",
    capacity=pb.Capacity(device="cpu", memory_bytes=1 << 30, threads=2, flops=1e9, uplink=1e6, downlink=1e6),
    endpoint="127.0.0.1:9",
    stages=pb.StageRange(first=0, stop=2),
)
"""A peer record."""


def sealed_record() -> bytes:
    """A signed peer record for the DHT, valid for one day."""
    data, expires = CONTRIBUTION.SerializeToString(deterministic=True), time.time() + DAY
    return pb.SignedRecord(
        record=data,
        signature=sign(envelope.record_message(SPEC.name, data, expires)),
        expires=expires,
        certificate=der(AUTHORITY.for_peer(PEER, TLS_KEY)),
    ).SerializeToString()


_MEMBERS = [
    pb.Member(peer=peer, stages=pb.StageRange(first=stage, stop=stage + 1), endpoint="h:1")
    for stage, peer in enumerate(PEERS[:2])
]
_ALONE = pb.Member(peer=PEERS[2], stages=pb.StageRange(first=0, stop=2), endpoint="")
PLAN = pb.Plan(
    epoch=1,
    from_round=1,
    reason="r",
    replicas=[
        pb.Replica(index=0, members=_MEMBERS, links=[pb.Link(k=16, dialer="upstream")], weight=1.0),
        pb.Replica(index=1, members=[_ALONE], weight=1.0, microbatches=3),
    ],
)
PLACE = pb.Place(peer=PEER, replica=1, position=1, stages=pb.StageRange(first=0, stop=1))
STATE = pb.StateRecord(run=SPEC.name, stage=1, part="stage", round=10, digest="d" * 64, holders=[PEER])
GROUP = pb.MatchReply(group_id="g", descriptors=[descriptor_of(1)], seconds=5.0)
MEASUREMENT = pb.Measurement(peer=PEER, round=1, train_loss=2.0, tokens=100, complete=True, steps=3)
STATUS = status_to_pb(
    RunStatus(
        run=SPEC.name,
        spec=SPEC,
        phase=RunPhase.GATHERING,
        cause=Cause(CauseCode.STARTING),
        rounds_decided=0,
        stage_rounds_committed=0,
        stage_rounds_aborted=0,
        peers=(),
        replicas=(),
        measurements=(),
        plan=None,
        anchors_agree=True,
        time=1.7e9,
    )
)
