"""Enrollment: a peer gets a certificate for an invite and a proof of its identity."""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Callable

import grpc
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey

from coordinator.authority import Authority
from coordinator.membership.invites import permitted_role
from coordinator.membership.joining import check_compatible
from coordinator.membership.open_places import CLOSED, OpenTerms
from coordinator.membership.validation import bad_request
from coordinator.run.command_loop import CommandLoop, Stopped
from coordinator.run.state import commands
from protocol.pb import hetnode_pb2 as pb
from protocol.pb import hetnode_pb2_grpc as pb_grpc
from protocol.server.calls import CallInterceptor, CallPolicy, Context, rate_limited
from protocol.server.limits import FairShare
from protocol.trust.envelope import enrollment_message, is_signed_by, renewal_message
from protocol.trust.invite import OPEN_INVITE
from protocol.trust.rate_limit import RateLimit
from protocol.trust.tls import tls_key_from_der
from protocol.types import PeerId
from protocol.wire.convert.fields import name_from_pb, peer_from_pb

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 16 << 10
MAX_CALLS, MAX_CALLS_OF_SOURCE = 4096, 1024

# Attempts of one source that show no good invite. They cost a signature to check, or are guesses.
_UNPROVEN_AT_ONCE, _UNPROVEN_PER_SECOND = 128, 1.0
# Enrollments with one invite: each costs signatures. A lab may let all its nodes in with one.
_PROVEN_AT_ONCE, _PROVEN_PER_SECOND = 2048, 50.0


class EnrollmentService(pb_grpc.EnrollmentServicer):
    """Serves clients without certificates. A stranger without an invite uses up its own attempts only.

    Args:
        command_loop: owns the state; it is running.
        authority: issues the certificates.
        coordinator: peer id of the key that signs specs and plans.
        api_address: advertised ``host:port`` of the coordinator's API.
        source_of: the source of a connection, by gRPC's name of the client.
        terms: for peers without an invite.
    """

    def __init__(
        self,
        command_loop: CommandLoop,
        authority: Authority,
        coordinator: PeerId,
        api_address: str,
        source_of: Callable[[str], str],
        terms: OpenTerms = CLOSED,
    ) -> None:
        self._terms = terms
        self._command_loop = command_loop
        self._authority = authority
        self._coordinator = coordinator
        self._api_address = api_address
        self._source_of = source_of
        self._unproven = RateLimit(_UNPROVEN_AT_ONCE, _UNPROVEN_PER_SECOND)
        self._proven = RateLimit(_PROVEN_AT_ONCE, _PROVEN_PER_SECOND)

    async def Enroll(self, request: pb.EnrollRequest, context: Context) -> pb.EnrollReply:
        secret_sha256 = hashlib.sha256(request.secret).hexdigest()
        source = self._source_of(context.peer())
        # Before any signature is verified.
        self._check_rate(request.invite_id, secret_sha256, source)
        check_compatible(self._command_loop.spec, request.protocol_version, "", request.oldest_protocol)
        invite = name_from_pb(request.invite_id, "the invite") if request.invite_id else ""
        message = enrollment_message(self._authority.pin, request.tls_public_key, invite)
        peer, key = claimant(request.peer, request.tls_public_key, message, request.proof)
        # Durable before the certificate exists: a crash must not give an invite one use too many.
        if invite == OPEN_INVITE:
            await self._command_loop.execute(self._terms.ask(peer, source))
        else:
            await self._command_loop.execute(commands.Enroll(peer, invite, secret_sha256))
        role = permitted_role(self._command_loop.state, peer)
        return pb.EnrollReply(
            certificate_pem=self._authority.for_peer(peer, key),
            authority_pem=self._authority.pem,
            coordinator=self._coordinator,
            api_address=self._api_address,
            run=self._command_loop.state.run,
            role=role.value if role else "",
        )

    def _check_rate(self, invite: str, secret_sha256: str, source: str) -> None:
        """Charge a call to its invite if it has the secret, otherwise to its source. Raises RATE_LIMITED."""
        now, invitation = self._command_loop.now(), self._command_loop.state.invitations.get(invite)
        if invitation is not None and hmac.compare_digest(secret_sha256, invitation.secret_sha256):
            if not self._proven.allows(invite, now):
                raise rate_limited(f"Too many enrollments with the invite {invite}")
        elif not self._unproven.allows(source, now):
            raise rate_limited(f"Too many enrollments without a good invite from {source}")


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


def admission(source_of: Callable[[str], str], drop: Callable[[str], None]) -> CallInterceptor:
    """Counts calls by source. `source_of` and `drop` a connection, by gRPC's name of the client."""

    def source(context: Context) -> str:
        return source_of(context.peer())

    calls = FairShare(MAX_CALLS_OF_SOURCE, MAX_CALLS)
    return CallInterceptor(CallPolicy(source, source_of, drop, lambda _: None, calls, Stopped, log))


def new_server(admission: CallInterceptor, *options: tuple[str, int]) -> grpc.aio.Server:
    """A server for clients without certificates, with neither port nor service yet."""
    return grpc.aio.server(
        interceptors=(admission,),
        options=(
            *options,
            # An enrollment takes one short connection: slow or silent clients lose theirs.
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_concurrent_streams", 4),
            ("grpc.server_handshake_timeout_ms", 10_000),
            ("grpc.max_connection_idle_ms", 30_000),
            ("grpc.max_connection_age_ms", 120_000),
            ("grpc.max_connection_age_grace_ms", 10_000),
        ),
    )
