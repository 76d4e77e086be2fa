"""Restricts the calls of the DHT to holders of a certificate of the run.

hivemind lets an authorizer sign and validate every unary call of the DHT, and its answer. hivemind's own
TokenAuthorizerBase binds tokens to an RSA key of the process. Here the token is the certificate that the
coordinator has issued to this peer, and the signature is that of the ed25519 key in its peer id.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding
from hivemind.proto.auth_pb2 import AccessToken
from hivemind.utils import get_dht_time
from hivemind.utils.auth import AuthorizerBase
from hivemind.utils.timed_storage import TimedStorage

from protocol.trust.envelope import is_signed_by
from protocol.trust.tls import certified_peer

log = logging.getLogger(__name__)

_CLOCK_SECONDS = 60.0  # difference between two clocks that is accepted
_MAX_NAMED = 1024  # peers whose refusal is logged


class CertificateAuthorizer(AuthorizerBase):  # type: ignore[misc]  # hivemind has no type information
    """Signs this peer's calls and answers; accepts those of peers with a certificate of the authority.

    Args:
        sign: with the identity of this peer.
        certificate: PEM file of this peer, read again when it has been replaced.
        authority: PEM file of the run's authority.
    """

    def __init__(self, sign: Callable[[bytes], bytes], certificate: Path, authority: Path) -> None:
        self._sign, self._path = sign, certificate
        self._authority = x509.load_pem_x509_certificate(authority.read_bytes())
        self._token = AccessToken()
        self._read_at = 0  # modification time of what was read
        self._banned: set[str] = set()
        self._seen_nonces: TimedStorage[bytes, None] = TimedStorage()
        self._named: set[str] = set()

    def ban(self, peers: Iterable[str]) -> None:
        self._banned.update(peers)

    def unban(self, peers: Iterable[str]) -> None:
        self._banned.difference_update(peers)

    async def sign_request(self, request: Any, service_public_key: object) -> None:
        auth = request.auth
        auth.client_access_token.CopyFrom(self._current_token())
        auth.time = get_dht_time()
        auth.nonce = secrets.token_bytes(16)
        auth.signature = self._sign(_message(request))

    async def validate_request(self, request: Any) -> bool:
        auth = request.auth
        now = get_dht_time()
        if not self._is_authorized(auth.client_access_token, request, now):
            return False
        if abs(auth.time - now) > _CLOCK_SECONDS or auth.nonce in self._seen_nonces:
            log.debug("refused a call of the DHT that is old, or came before")
            return False
        self._seen_nonces.store(bytes(auth.nonce), None, now + 3 * _CLOCK_SECONDS)
        return True

    async def sign_response(self, response: Any, request: Any) -> None:
        auth = response.auth
        auth.service_access_token.CopyFrom(self._current_token())
        auth.nonce = request.auth.nonce
        auth.signature = self._sign(_message(response))

    async def validate_response(self, response: Any, request: Any) -> bool:
        auth = response.auth
        authorized = self._is_authorized(auth.service_access_token, response, get_dht_time())
        return authorized and auth.nonce == request.auth.nonce

    def _is_authorized(self, token: AccessToken, message: Any, now: float) -> bool:
        """Whether the holder of `token`, not banned, has signed `message`."""
        try:
            certificate = certified_peer(token.public_key, self._authority)
        except ValueError as error:
            self._refuse(token.username[:64], str(error))
            return False
        peer = certificate.peer
        if peer in self._banned:
            self._refuse(peer, "it was banned")
        elif not certificate.holds_at(now):
            self._refuse(peer, "its certificate has expired")
        elif not is_signed_by(peer, _message(message), message.auth.signature):
            self._refuse(peer, "it has not signed this message")
        else:
            return True
        return False

    def _refuse(self, peer: str, why: str) -> None:
        if peer not in self._named and len(self._named) < _MAX_NAMED:
            self._named.add(peer)
            log.warning("refused %r the DHT: %s", peer, why)

    def _current_token(self) -> AccessToken:
        written_at = self._path.stat().st_mtime_ns
        if written_at != self._read_at:
            der = x509.load_pem_x509_certificate(self._path.read_bytes()).public_bytes(Encoding.DER)
            peer = certified_peer(der, self._authority).peer
            self._token, self._read_at = AccessToken(username=peer, public_key=der), written_at
        return self._token


def _message(message: Any) -> bytes:
    """The bytes to sign: the type of the message, and all of it except the signature."""
    unsigned = type(message)()
    unsigned.CopyFrom(message)
    unsigned.auth.ClearField("signature")
    body: bytes = unsigned.SerializeToString(deterministic=True)
    return f"hetnode dht {message.DESCRIPTOR.full_name} 1\n".encode() + body


def signer_of(identity: Path) -> Callable[[bytes], bytes]:
    """A function that signs with the ed25519 key of an identity file. Its owner has checked the file."""
    return Ed25519PrivateKey.from_private_bytes(identity.read_bytes()[4:36]).sign
