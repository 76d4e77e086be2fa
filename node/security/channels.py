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
_DATES = {"has expired": "has expired", "not yet valid": "is not yet valid"}


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


class WrongClock(HetnodeError):
    """A certificate, as `what` says, is not in date by the clock of this machine. That ends by itself.

    `off` tells by how much the clock of this machine is off, `more` what else is known.
    """

    def __init__(self, what: str, off: str = "", more: str = "") -> None:
        clock = f"by the clock of this machine, which says {stamp(time.time())}{off}{more}"
        whose = "the clock of this machine" if off else "the clock of this machine, or that of the other"
        super().__init__(
            ErrorCode.COORDINATOR_UNREACHABLE,
            f"{what} {clock}.",
            f"Set {whose}: this node waits, and goes on then.",
        )
        self.what, self.more = what, more


def tls_error(address: str, who: str, why: str, off: str = "", own: str = "") -> HetnodeError:
    """What to raise after :func:`tls_failure`: a wrong clock ends by itself, another authority does not.

    `who` ends the sentence "What answers at ADDRESS is not ..."; `off` and `own` are as of WrongClock.
    """
    if not (dated := out_of_date(why)):
        return wrong_authority(f"What answers at {address} is not {who}: {why}.")
    return WrongClock(f"The certificate of {address} {dated}", off, own)


def out_of_date(why: str) -> str:
    """What a message of TLS says about the dates of a certificate; "" if nothing."""
    return next((text for sign, text in _DATES.items() if sign in why), "")


def tls_failure(error: grpc.RpcError) -> str:
    """The message of TLS if the call failed because of TLS; otherwise ""."""
    # gRPC has no status code for TLS failures, so its text is searched.
    details = str(getattr(error, "details", lambda: "")() or "")
    return details[:300] if any(word in details for word in _TLS_FAILURES) else ""
