"""Mutual TLS over gRPC: channels that trust only one named peer, and what servers show."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import grpc

from node.security.credentials import Credentials, stamp
from protocol.errors import ErrorCode, HetnodeError
from protocol.server.renewed_server import ServerTls
from protocol.trust.names import wrong_authority

DIRECT = ("grpc.enable_http_proxy", 0)
"""The option of each channel: a proxy is for the hub, and reaches neither a home nor this machine."""
_TLS_FAILURES = ("handshake", "Peer name", "certificate", "CERTIFICATE", "Hostname Verification")


def open_channel(
    address: str, credentials: Credentials, name: str, options: Sequence[tuple[str, Any]]
) -> grpc.aio.Channel:
    """A channel to `address`, which must show a certificate for the DNS name `name`.

    This end always shows the certificate of `credentials`: a renewed one needs a new channel.
    """
    # Certificates name peers, not machines, so the name to verify is not that of the address.
    tls = grpc.ssl_channel_credentials(credentials.authority, credentials.key, credentials.certificate)
    named = ("grpc.ssl_target_name_override", name)
    return grpc.aio.secure_channel(address, tls, options=(*options, DIRECT, named))


def server_tls(credentials: Credentials) -> ServerTls:
    """What a server shows that requires a certificate of the same authority."""
    return ServerTls(credentials.key, credentials.certificate, credentials.authority)


def tls_error(address: str, who: str, why: str, own: str = "") -> HetnodeError:
    """What to raise after :func:`tls_failure`: a wrong clock ends by itself, another authority does not.

    `who` ends the sentence "What answers at ADDRESS is not ..."; `own` tells the time of another clock.
    """
    if not any(sign in why for sign in ("has expired", "not yet valid")):
        return wrong_authority(f"What answers at {address} is not {who}: {why}.")
    sign = "has expired" if "has expired" in why else "is not yet valid"
    now = stamp(time.time())
    return HetnodeError(
        ErrorCode.COORDINATOR_UNREACHABLE,
        f"The certificate of {address} {sign} by the clock of this machine, which says {now}{own}.",
        "Set the clock of this machine, or that of the coordinator: one of them is wrong.",
    )


def tls_failure(error: grpc.RpcError) -> str:
    """The message of TLS if the call failed because of TLS; otherwise ""."""
    # gRPC has no status code for TLS failures, so its text is searched.
    details = str(getattr(error, "details", lambda: "")() or "")
    return details[:300] if any(word in details for word in _TLS_FAILURES) else ""
