"""A new peer exchanges an invite for a certificate. It trusts only the authority that the invite pins."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time

import grpc
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from node.security.channels import DIRECT, WrongClock, tls_error, tls_failure
from node.security.credentials import Credentials, RunCredentials, folder_of, new_tls_key, stamp
from node.security.identity import Identity
from protocol.errors import ErrorCode, HetnodeError
from protocol.pb import hetnode_pb2 as pb
from protocol.pb import hetnode_pb2_grpc as pb_grpc
from protocol.server.clock import bound_by, off_text
from protocol.trust.envelope import enrollment_message, public_key_of
from protocol.trust.host_port import split_host_port
from protocol.trust.invite import Invite
from protocol.trust.names import COORDINATOR_NAME, ENROLLMENT_NAME, wrong_authority
from protocol.trust.run_id import names_authority
from protocol.trust.tls import authority_of, certified_peer
from protocol.types import PROTOCOL_VERSION, PeerId
from protocol.wire.convert.fields import role_from_pb
from protocol.wire.rpc_errors import error_from_rpc
from protocol.wire.versions import OLDEST_PROTOCOL

_MAX_MESSAGE_BYTES = 64 << 10
_RETRY_SECONDS = 0.5
_NO_NAME = (socket.EAI_NONAME, socket.EAI_NODATA)


async def enroll(invite: Invite, identity: Identity, deadline: float) -> RunCredentials:
    """Spend one use of `invite` on a certificate for `identity`, and store it next to the identity's file.

    The same identity may repeat this, with a new TLS key each time, without spending another use.

    Raises HetnodeError: COORDINATOR_UNREACHABLE without an answer in `deadline` seconds; BAD_ADDRESS for the
    name of no host; WRONG_AUTHORITY, before anything is sent, if the authority at the address does not match
    the invite's pin; INVITE_EXPIRED, INVITE_USED or another refusal.
    """
    key = new_tls_key()
    try:
        async with asyncio.timeout(deadline):
            # First only the certificate: the invite is a secret, and an impostor must not get it.
            shown = await _shown_certificate(invite.enrollment)
            authority = authority_of(shown, invite.pin)
            authority_pem = authority.public_bytes(Encoding.PEM)
            tls = Credentials(authority_pem, b"", key)
            reply = await _enroll(invite, identity, tls, shown)
    except TimeoutError:
        raise _unreachable(invite.enrollment, f"no answer within {deadline:.0f} s") from None
    run = _checked_run(reply.run, invite.pin)
    credentials = RunCredentials(
        folder_of(identity.path, run),
        run,
        reply.api_address or invite.api,
        _checked_coordinator(reply.coordinator),
        role_from_pb(reply.role) if reply.role else None,
        Credentials(authority_pem, reply.certificate_pem, key),
    )
    check_own(credentials.tls, authority, identity.peer)
    credentials.save()
    return credentials


def check_own(tls: Credentials, authority: x509.Certificate, peer: PeerId) -> None:
    """Check a certificate that the coordinator has just issued to this node, before it is stored.

    Raises HetnodeError WRONG_AUTHORITY unless the authority signed it for this peer and this TLS key.
    """
    try:
        certificate = x509.load_pem_x509_certificate(tls.certificate)
        named = certified_peer(certificate.public_bytes(Encoding.DER), authority).peer
        public = certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    except ValueError as error:
        raise wrong_authority(f"The coordinator sent a certificate that cannot be used: {error}.") from None
    if (named, public) != (peer, tls.public_key):
        raise wrong_authority("The coordinator sent the certificate of another peer or key.")


async def _shown_certificate(address: str, waits: bool = True) -> bytes:
    """The DER certificate of a TLS handshake without verification; if `waits`, tries until cancelled."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])  # what gRPC's servers speak
    host, port = split_host_port(address)
    while True:
        try:
            _, writer = await asyncio.open_connection(
                host, port, ssl=context, server_hostname=ENROLLMENT_NAME
            )
        except ssl.SSLError as error:
            why = f"does not speak TLS as a coordinator does: {error}"
            raise wrong_authority(f"What answers at {address} {why}.") from None
        except ConnectionError as error:
            if not waits:
                raise _unreachable(address, str(error)) from None
            await asyncio.sleep(_RETRY_SECONDS)  # the coordinator may still be starting
            continue
        except OSError as error:
            if is_unknown_name(error):
                raise unknown_address(address, str(error)) from None
            raise _unreachable(address, str(error)) from None
        try:
            shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        finally:
            writer.transport.abort()
        return bytes(shown or b"")


async def clock_error(
    credentials: RunCredentials, what: str, deadline: float, more: str = ""
) -> WrongClock | None:
    """What to say where the clock of this machine is off by what the coordinator shows; None if it is not.

    `what` is not in date by this clock, as in WrongClock. Raises HetnodeError as :func:`enroll`.
    """
    try:
        async with asyncio.timeout(deadline):
            shown = await _shown_certificate(credentials.api)
    except TimeoutError:
        raise _unreachable(credentials.api, f"no answer within {deadline:.0f} s") from None
    authority_of(shown, credentials.tls.pin)
    ahead = _ahead_by(shown)
    return WrongClock(what, off_text(ahead, "at least "), more) if ahead else None


async def shows_authority(address: str, pin: bytes, deadline: float) -> bool:
    """Whether a coordinator of the authority with this pin answers, whatever clocks and calls say."""
    try:
        async with asyncio.timeout(deadline):
            authority_of(await _shown_certificate(address, waits=False), pin)
    except (HetnodeError, TimeoutError):
        return False
    return True


async def clock_ahead(invite: Invite) -> float:
    """Seconds by which the clock of this machine is at least ahead. Raises HetnodeError, OSError."""
    shown = await _shown_certificate(invite.enrollment)
    authority_of(shown, invite.pin)
    return _ahead_by(shown)


def _ahead_by(shown: bytes) -> float:
    certificate = x509.load_der_x509_certificate(shown)
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    return bound_by(begins.timestamp(), ends.timestamp(), time.time())


async def _enroll(invite: Invite, identity: Identity, tls: Credentials, shown: bytes) -> pb.EnrollReply:
    public_key = tls.public_key
    request = pb.EnrollRequest(
        protocol_version=PROTOCOL_VERSION,
        oldest_protocol=OLDEST_PROTOCOL,
        invite_id=invite.id,
        secret=invite.secret,
        peer=identity.peer,
        tls_public_key=public_key,
        proof=identity.sign(enrollment_message(invite.pin, public_key, invite.id)),
    )
    # Behind one port the name tells the two services apart.
    name = ENROLLMENT_NAME if invite.enrollment == invite.api else COORDINATOR_NAME
    options = (
        DIRECT,
        ("grpc.ssl_target_name_override", name),
        ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    )
    channel = grpc.aio.secure_channel(
        invite.enrollment, grpc.ssl_channel_credentials(tls.authority), options=options
    )
    try:
        reply: pb.EnrollReply = await pb_grpc.EnrollmentStub(channel).Enroll(request)
        return reply
    except grpc.aio.AioRpcError as error:
        refusal, address = error_from_rpc(error), invite.enrollment
        if refusal is None and (why := tls_failure(error)):
            issued = x509.load_der_x509_certificate(shown).not_valid_before_utc.timestamp()
            off, told = off_text(_ahead_by(shown), "at least "), f"; it was issued after {stamp(issued)}"
            refusal = tls_error(address, "the invite's coordinator", why, off, told)
        raise refusal or _unreachable(address, f"{error.code().name}: {error.details()}"[:300]) from None
    finally:
        await channel.close()


def is_unknown_name(error: OSError) -> bool:
    """Whether the resolver knows for sure that there is no such host. Without a network it does not know."""
    return isinstance(error, socket.gaierror) and error.errno in _NO_NAME


def unknown_address(address: str, why: str) -> HetnodeError:
    return HetnodeError(
        ErrorCode.BAD_ADDRESS,
        f"'{address}' is not an address of a coordinator: {why}.",
        "Check the name of its host; ask the operator for a new invite if it has another name now.",
    )


def _checked_coordinator(peer: str) -> PeerId:
    try:
        public_key_of(peer)
    except ValueError as error:
        raise wrong_authority(f"The coordinator named no key of its own: {error}.") from None
    return PeerId(peer)


def _checked_run(run: str, pin: bytes) -> str:
    """The id of the run, if it names the authority with this pin and is safe as the name of a folder."""
    is_ascii = run.isascii() and all(
        c.isalnum() or c in "-_." for c in run
    )  # others take more bytes in a name
    if not run or len(run) > 128 or run.startswith(".") or not is_ascii:
        raise HetnodeError(
            ErrorCode.BAD_REQUEST,
            f"The coordinator named its run {run!r:.80}, which cannot be a name.",
            "Update the older program: hetnode on this machine, or the coordinator's.",
        )
    if not names_authority(run, pin):
        raise wrong_authority(f"The coordinator named a run of another authority, {run}.")
    return run


def _unreachable(address: str, why: str) -> HetnodeError:
    return HetnodeError(
        ErrorCode.COORDINATOR_UNREACHABLE,
        f"The coordinator's enrollment at {address} does not answer: {why}.",
        "Check the network here; ask the operator whether 'hetnode coordinator' runs there, open to others.",
    )
