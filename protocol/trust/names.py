"""How certificates name peers.

A client expects the DNS name of the peer that it dials; a server reads the URI of the client. Short commands
import this without the library that reads certificates.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Protocol

from protocol.errors import ErrorCode, HetnodeError
from protocol.types import PeerId

COORDINATOR_NAME = "coordinator.hetnode"
ENROLLMENT_NAME = "enrollment.hetnode"
"""Of the same server certificate, where enrollment has the port of the API."""
COORDINATOR_URI = "hetnode:coordinator"
OPERATOR_URI = "hetnode:operator"
_PEER_URI = "hetnode:peer:"
TERM_HEADER = "hetnode-term-bin"
"""The metadata by which a caller shows the proof of the newest term (protocol.trust.term) that it knows."""


class Authenticated(Protocol):
    """The one part of a gRPC server context that is read here."""

    def auth_context(self) -> Mapping[str, Iterable[bytes]]: ...


def tls_name(peer: str) -> str:
    """The DNS name in the certificate of `peer`; a client gives it as ``grpc.ssl_target_name_override``."""
    return f"{hashlib.sha256(peer.encode()).hexdigest()[:40]}.hetnode"


def peer_uri(peer: str) -> str:
    return f"{_PEER_URI}{peer}"


def peer_of(uri: str) -> PeerId | None:
    """The peer that `uri` names; None if it is not the URI of a peer."""
    return PeerId(uri.removeprefix(_PEER_URI)) if uri.startswith(_PEER_URI) else None


def identity_of(context: Authenticated) -> str:
    """The URI in the client's certificate of this call; "" unless there is exactly one."""
    # A certificate of several URIs could name two peers, so it names none.
    uris = list(context.auth_context().get("peer_uri", ()))
    return uris[0].decode("ascii", errors="replace") if len(uris) == 1 else ""


def wrong_authority(cause: str) -> HetnodeError:
    remedy = (
        "Another run may be there by now, or another machine: ask the operator for a new invite. If that is "
        "refused, too, somebody in between answers in the operator's place."
    )
    return HetnodeError(ErrorCode.WRONG_AUTHORITY, cause, remedy)
