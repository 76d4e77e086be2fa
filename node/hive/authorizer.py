"""Restricts the calls of the DHT to peers that hold a certificate of the run.

hivemind lets an authorizer sign and validate every unary call of the DHT and its answer. hivemind's own
TokenAuthorizerBase binds a token to an RSA key of the process. Here the token is the certificate that the
coordinator issued to this peer. The ed25519 key of the peer id makes the signature.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
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

_CLOCK_SECONDS = 60.0  # largest accepted difference between the clocks of two peers
_MAX_NAMED = 1024  # refused peers that the log names; a bound, because anyone can invent peer ids


class CertificateAuthorizer(AuthorizerBase):  # type: ignore[misc]  # hivemind has no type information
    """Signs this peer's calls and answers; accepts those of peers with a certificate of the authority.

    Args:
        sign: signs bytes with the identity of this peer.
        certificate: PEM file of this peer's certificate; read again after a renewal has replaced it.
        authority: PEM file of the run's authority.

    Attributes:
        banned: peers that are refused although they hold a certificate.
    """

    def __init__(self, sign: Callable[[bytes], bytes], certificate: Path, authority: Path) -> None:
        self._sign, self._path = sign, certificate
        self._authority = x509.load_pem_x509_certificate(authority.read_bytes())
        self._token = AccessToken()
        self._written_at = 0  # modification time of the certificate in `_token`
        self.banned: set[str] = set()
        self._seen_nonces: TimedStorage[bytes, None] = TimedStorage()
        self._named: set[str] = set()

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
            log.debug("refused a call of the DHT that is too old or was sent twice")
            return False
        # A replay passes the check of its time for at most twice the bound: the sender's clock may be ahead.
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
        # The nonce ties the answer to this request: an answer to another one cannot be replayed.
        return authorized and auth.nonce == request.auth.nonce

    def _is_authorized(self, token: AccessToken, message: Any, now: float) -> bool:
        """Whether `token` belongs to a certified peer that is not banned and that signed `message`."""
        try:
            certificate = certified_peer(token.public_key, self._authority)
        except ValueError as error:
            self._refuse(token.username[:64], str(error))
            return False
        peer = certificate.peer
        if peer in self.banned:
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
        if written_at != self._written_at:
            der = x509.load_pem_x509_certificate(self._path.read_bytes()).public_bytes(Encoding.DER)
            peer = certified_peer(der, self._authority).peer
            self._token, self._written_at = AccessToken(username=peer, public_key=der), written_at
        return self._token


def _message(message: Any) -> bytes:
    """The bytes to sign: the type of the message, and the message without its signature."""
    unsigned = type(message)()
    unsigned.CopyFrom(message)
    unsigned.auth.ClearField("signature")
    body: bytes = unsigned.SerializeToString(deterministic=True)
    # The type keeps a signed request from being used as an answer of the same bytes.
    return f"hetnode dht {message.DESCRIPTOR.full_name} 1\n".encode() + body


def signer_of(identity: Path) -> Callable[[bytes], bytes]:
    """A function that signs with the ed25519 key of an identity file that the main process has checked."""
    # libp2p's form: 4 bytes of protobuf header, the 32-byte seed, the 32-byte public key.
    return Ed25519PrivateKey.from_private_bytes(identity.read_bytes()[4:36]).sign
