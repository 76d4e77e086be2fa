"""Mutual TLS over gRPC: channels that trust only one named peer, and servers that require a certificate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import grpc

from node.security.credentials import Credentials

_TLS_FAILURES = ("handshake", "Peer name", "certificate", "CERTIFICATE", "Hostname Verification")


def open_channel(
    address: str, credentials: Credentials, name: str, options: Sequence[tuple[str, Any]]
) -> grpc.aio.Channel:
    """A channel to `address`, which must show a certificate for the DNS name `name`.

    This end always shows the certificate of `credentials`: a renewed one needs a new channel.
    """
    # Certificates name peers, not machines, so the name to verify is not that of the address.
    tls = grpc.ssl_channel_credentials(credentials.authority, credentials.key, credentials.certificate)
    return grpc.aio.secure_channel(address, tls, options=(*options, ("grpc.ssl_target_name_override", name)))


def server_credentials(current: Callable[[], Credentials]) -> grpc.ServerCredentials:
    """Credentials of a server that requires a certificate. `current` is called for each new connection."""
    shown = current()

    def configuration(credentials: Credentials) -> Any:
        pair = (credentials.key, credentials.certificate)
        return grpc.ssl_server_certificate_configuration([pair], root_certificates=credentials.authority)

    def changed() -> Any:
        nonlocal shown
        if current() == shown:
            return None  # gRPC then keeps the former configuration
        shown = current()
        return configuration(shown)

    return grpc.dynamic_ssl_server_credentials(
        configuration(shown), changed, require_client_authentication=True
    )


def tls_failure(error: grpc.RpcError) -> str:
    """The message of TLS if the call failed because of TLS; otherwise ""."""
    # gRPC has no status code for TLS failures, so its text is searched.
    details = str(getattr(error, "details", lambda: "")() or "")
    return details[:300] if any(word in details for word in _TLS_FAILURES) else ""
