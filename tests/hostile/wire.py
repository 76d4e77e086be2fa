"""The bytes of docs/protocol/minimum-peer.md: identities, invites, signatures. Imports none of hetnode."""

from __future__ import annotations

import base64
import hashlib
import json
import struct
import tempfile
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import base58
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_tools import protoc

PROTOCOL_VERSION = 4
COORDINATOR = "coordinator.hetnode"
PACKAGE = "hetnode.v1"

_PROTO = Path(__file__).resolve().parents[2] / "proto"
_ID_PREFIX = bytes.fromhex("002408011220")
_AUTHORITY_OID = x509.ObjectIdentifier("2.25.31063534994493156204315036349397164680")


@cache
def _pool() -> DescriptorPool:
    """Everything in proto/, compiled now, apart from any other messages of this process."""
    pool = DescriptorPool()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "messages"
        files = [str(path.relative_to(_PROTO)) for path in sorted(_PROTO.rglob("*.proto"))]
        options = ("protoc", f"-I{_PROTO}", f"--descriptor_set_out={out}", "--include_imports", *files)
        assert protoc.main(options) == 0, "proto/ does not compile"
        for file in FileDescriptorSet.FromString(out.read_bytes()).file:
            pool.Add(file)
    return pool


@cache
def message(name: str) -> Any:
    """The class of a message, such as "JoinRequest"."""
    return GetMessageClass(_pool().FindMessageTypeByName(f"{PACKAGE}.{name}"))


@cache
def method(service: str, name: str) -> tuple[str, Any, Any, bool, bool]:
    """Path, class of requests, class of replies, and whether each of them is a stream."""
    found = _pool().FindServiceByName(f"{PACKAGE}.{service}").methods_by_name[name]
    return (
        f"/{PACKAGE}.{service}/{name}",
        GetMessageClass(found.input_type),
        GetMessageClass(found.output_type),
        found.client_streaming,
        found.server_streaming,
    )


def methods(service: str) -> list[str]:
    """The names of its calls."""
    return list(_pool().FindServiceByName(f"{PACKAGE}.{service}").methods_by_name)


def canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


@dataclass(frozen=True)
class Identity:
    """An ed25519 key and the peer id that contains it."""

    key: Ed25519PrivateKey = field(default_factory=Ed25519PrivateKey.generate, repr=False)

    @property
    def public(self) -> bytes:
        return self.key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)

    @property
    def peer(self) -> str:
        return base58.b58encode(_ID_PREFIX + self.public).decode()

    @property
    def file(self) -> bytes:
        """What libp2p's daemon reads."""
        return bytes.fromhex("08011240") + self.key.private_bytes_raw() + self.public


def verify(peer: str, signed: bytes, signature: bytes) -> None:
    """Raises InvalidSignature unless `peer` has signed these bytes."""
    raw = base58.b58decode(peer)
    if len(raw) != 38 or not raw.startswith(_ID_PREFIX):
        raise InvalidSignature(f"{peer} contains no key")
    Ed25519PublicKey.from_public_bytes(raw[6:]).verify(signature, signed)


class TlsKey:
    """An EC P-256 key for one end of TLS."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())

    @property
    def pem(self) -> bytes:
        return self._key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())

    @property
    def public(self) -> bytes:
        return self._key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def tls_name(peer: str) -> str:
    return f"{hashlib.sha256(peer.encode()).hexdigest()[:40]}.hetnode"


def carried_authority(leaf: bytes, pin: bytes) -> bytes:
    """PEM of the authority in a coordinator's certificate (DER). ValueError if it has another pin."""
    extension = x509.load_der_x509_certificate(leaf).extensions.get_extension_for_oid(_AUTHORITY_OID)
    der = extension.value.value  # type: ignore[attr-defined]
    if hashlib.sha256(der).digest() != pin:
        raise ValueError("another authority than that of the invite")
    return x509.load_der_x509_certificate(der).public_bytes(Encoding.PEM)


def check_certificate(pem: bytes, authority_pem: bytes, peer: str, key: TlsKey) -> None:
    """ValueError or InvalidSignature unless the authority has certified `key` for `peer`."""
    leaf, authority = (x509.load_pem_x509_certificate(each) for each in (pem, authority_pem))
    leaf.verify_directly_issued_by(authority)
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    if names.get_values_for_type(x509.UniformResourceIdentifier) != [f"hetnode:peer:{peer}"]:
        raise ValueError("a certificate for another peer")
    if names.get_values_for_type(x509.DNSName) != [tls_name(peer)]:
        raise ValueError("a certificate with another TLS name")
    if leaf.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo) != key.public:
        raise ValueError("a certificate for another key")


@dataclass(frozen=True)
class Invite:
    pin: bytes
    id: str
    secret: bytes = field(repr=False)
    api: str
    enrollment: str

    @classmethod
    def parse(cls, text: str) -> Invite:
        encoded = text.strip().removeprefix("hetnode1-")
        data = base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4))
        body, checksum = data[:-4], data[-4:]
        if hashlib.sha256(body).digest()[:4] != checksum:
            raise ValueError("a part of the invite is wrong")
        rest, addresses = body[54:], []
        for _ in range(2):
            addresses.append(rest[1 : 1 + rest[0]].decode())
            rest = rest[1 + rest[0] :]
        return cls(body[:32], body[32:38].hex(), body[38:54], *addresses)


def run_id(preset: str, spec_hash: str, pin: bytes) -> str:
    return f"{preset}-{spec_hash[:12]}-{pin.hex()[:32]}"


# What is signed


def enrollment(pin: bytes, invite_id: str, tls_key: bytes) -> bytes:
    return b"hetnode enrolment 1\n" + pin + invite_id.encode() + b"\n" + tls_key


def renewal(pin: bytes, tls_key: bytes) -> bytes:
    return b"hetnode renewal 1\n" + pin + tls_key


def spec(run: str, spec_json: str) -> bytes:
    return b"hetnode spec 2\n" + run.encode() + b"\n" + spec_json.encode()


def plan(run: str, signed_plan: bytes) -> bytes:
    return b"hetnode plan 1\n" + run.encode() + b"\n" + signed_plan


def state(run: str, record: bytes) -> bytes:
    return b"hetnode state 1\n" + run.encode() + b"\n" + record


def record(run: str, data: bytes, expires: float) -> bytes:
    return b"hetnode record 3\n" + run.encode() + b"\n" + struct.pack("<d", expires) + data


def descriptor(unsigned: Any) -> bytes:
    """Of a PayloadDescriptor."""
    names = (
        "run",
        "epoch",
        "stage",
        "round",
        "owner",
        "anchor_digest",
        "codec",
        "weight",
        "nbytes",
        "sha256",
    )
    return b"hetnode payload 2\n" + canonical({name: getattr(unsigned, name) for name in names})


def dht_call(run: str, receiver: str, unsigned: Any) -> bytes:
    """Of a request or an answer of hivemind's DHT, without auth.signature."""
    name = unsigned.DESCRIPTOR.full_name
    return f"hetnode dht {name} 2\n{run}\n{receiver}\n".encode() + unsigned.SerializeToString(
        deterministic=True
    )
