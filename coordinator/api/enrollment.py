"""Enrollment: a peer gets a certificate for an invite and a proof of its identity."""

from __future__ import annotations

import hashlib
from ipaddress import IPv6Address, ip_address
from urllib.parse import unquote

import grpc
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey

from coordinator.api.access import rate_limited
from coordinator.api.rpc_handling import Context, Decoding, answering
from coordinator.authority import Authority
from coordinator.command_loop import CommandLoop
from coordinator.membership.invites import permitted_role
from coordinator.membership.joining import check_compatible
from coordinator.membership.validation import bad_request
from coordinator.state import commands
from protocol.pb import hetnode_pb2 as pb
from protocol.pb import hetnode_pb2_grpc as pb_grpc
from protocol.trust.envelope import enrollment_message, is_signed_by, renewal_message
from protocol.trust.rate_limit import RateLimit
from protocol.trust.tls import tls_key_from_der
from protocol.types import PeerId
from protocol.wire.convert.fields import name_from_pb, peer_from_pb

MAX_MESSAGE_BYTES = 16 << 10
MAX_CALLS = 256

# Enrollments of one source: all nodes of one household or lab may share an address.
_AT_ONCE, _PER_SECOND = 128, 1.0
# Enrollments in total: each one costs signatures, and a caller may have many addresses.
_AT_ONCE_IN_ALL, _PER_SECOND_IN_ALL = 512, 20.0


class EnrollmentService(pb_grpc.EnrollmentServicer):
    """Serves clients without certificates: messages are small, and calls are limited per source and in total.

    Args:
        command_loop: owns the state; it is running.
        authority: issues the certificates.
        coordinator: peer id of the key that signs specs and plans.
        api_address: advertised ``host:port`` of the coordinator's API.
    """

    def __init__(
        self, command_loop: CommandLoop, authority: Authority, coordinator: PeerId, api_address: str
    ) -> None:
        self._command_loop = command_loop
        self._authority = authority
        self._coordinator = coordinator
        self._api_address = api_address
        self._by_source = RateLimit(_AT_ONCE, _PER_SECOND)
        self._in_all = RateLimit(_AT_ONCE_IN_ALL, _PER_SECOND_IN_ALL, keys=1)

    @answering
    async def Enroll(self, request: pb.EnrollRequest, context: Context) -> pb.EnrollReply:
        now = self._command_loop.now()
        source = source_of(context.peer())
        # Before any signature is verified.
        if not (self._by_source.allows(source, now) and self._in_all.allows(None, now)):
            raise rate_limited(f"Too many enrollments from {source}")
        check_compatible(self._command_loop.spec, request.protocol_version, "")
        invite = name_from_pb(request.invite_id, "the invite") if request.invite_id else ""
        message = enrollment_message(self._authority.pin, request.tls_public_key, invite)
        peer, key = claimant(request.peer, request.tls_public_key, message, request.proof)
        secret_sha256 = hashlib.sha256(request.secret).hexdigest()
        # Durable before the certificate exists: a crash must not give an invite one use too many.
        await self._command_loop.execute(commands.Enroll(peer, invite, secret_sha256))
        role = permitted_role(self._command_loop.state, peer)
        return pb.EnrollReply(
            certificate_pem=self._authority.for_peer(peer, key),
            authority_pem=self._authority.pem,
            coordinator=self._coordinator,
            api_address=self._api_address,
            run=self._command_loop.spec.run_id,
            role=role.value if role else "",
        )


def renew(authority: Authority, request: pb.RenewRequest) -> pb.RenewReply:
    """A new certificate for a peer that has called with a valid one. Raises BAD_REQUEST."""
    message = renewal_message(authority.pin, request.tls_public_key)
    peer, key = claimant(request.peer, request.tls_public_key, message, request.proof)
    return pb.RenewReply(certificate_pem=authority.for_peer(peer, key))


def claimant(
    claimed: str, tls_public_key: bytes, message: bytes, proof: bytes
) -> tuple[PeerId, EllipticCurvePublicKey]:
    """The claimed peer and its TLS key, after a check of `proof`, the peer's signature of `message`.

    Raises:
        HetnodeError: BAD_REQUEST if a part is malformed or another key has made the proof.
    """
    peer = peer_from_pb(claimed)
    try:
        key = tls_key_from_der(tls_public_key)
    except ValueError as error:
        raise bad_request(str(error)) from None
    if not is_signed_by(peer, message, proof):
        raise bad_request(f"the request of {peer} is not signed by it")
    return peer, key


def source_of(peer: str) -> str:
    """The source of a call for its rate limit: IPv4 host or IPv6 /64, from gRPC's name of the client."""
    scheme, _, address = peer.partition(":")
    host = unquote(address).rpartition(":")[0].strip("[]")
    try:
        found = ip_address(host.partition("%")[0])
    except ValueError:
        return scheme or "unknown"
    if isinstance(found, IPv6Address):
        if found.ipv4_mapped is not None:
            return str(found.ipv4_mapped)
        # One household owns a whole /64.
        return f"{IPv6Address(int(found) >> 64 << 64)}/64"
    return str(found)


def new_server() -> grpc.aio.Server:
    """A server for clients without certificates, with neither port nor service yet."""
    return grpc.aio.server(
        interceptors=(Decoding(),),
        options=(
            ("grpc.so_reuseport", 0),  # a second coordinator on the same port must fail
            # An enrollment takes one short connection: slow or silent clients lose theirs.
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_concurrent_streams", 4),
            ("grpc.max_connection_idle_ms", 30_000),
            ("grpc.max_connection_age_ms", 120_000),
        ),
        maximum_concurrent_rpcs=MAX_CALLS,
    )
