"""Restricts the calls of the DHT to peers that hold a certificate of the run.

hivemind lets an authorizer sign and validate every unary call of the DHT and its answer. hivemind's own
TokenAuthorizerBase binds a token to an RSA key of the process. Here the token is the certificate that the
coordinator issued to this peer. The ed25519 key of the peer id makes the signature.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding
from hivemind.proto.auth_pb2 import AccessToken
from hivemind.utils import get_dht_time
from hivemind.utils.auth import AuthorizerBase
from hivemind.utils.timed_storage import TimedStorage

from node.exchange.allow_list import RefusedPeers
from protocol.trust.envelope import is_signed_by
from protocol.trust.tls import certified_peer

log = logging.getLogger(__name__)

_CLOCK_SECONDS = 60.0  # largest accepted difference between the clocks of two peers
_NONCE_BYTES = 16
_MAX_NONCES = 1 << 16

CALLER: ContextVar[str] = ContextVar("caller")
"""Id of the peer whose call this task answers, as libp2p's handshake has proved it."""


class CertificateAuthorizer(AuthorizerBase):  # type: ignore[misc]  # hivemind has no type information
    """Signs this peer's calls and answers; accepts those of peers with a certificate of the authority.

    What is signed names the run and the receiver: no other peer accepts it, nor does the same peer in another
    run. An answer counts only from the peer that was called.

    Args:
        run: the id of the run.
        sign: signs bytes with the identity of this peer.
        certificate: PEM file of this peer's certificate; read again after a renewal has replaced it.
        authority: PEM file of the run's authority.

    Attributes:
        banned: peers that are refused although they hold a certificate.
    """

    def __init__(self, run: str, sign: Callable[[bytes], bytes], certificate: Path, authority: Path) -> None:
        self._run, self._sign, self._path = run, sign, certificate
        self._authority = x509.load_pem_x509_certificate(authority.read_bytes())
        self._token = AccessToken()
        self._written_at = 0  # modification time of the certificate in `_token`
        self.banned: set[str] = set()
        self._seen_nonces: TimedStorage[bytes, None] = TimedStorage(_MAX_NONCES)
        self._refused = RefusedPeers()

    async def sign_request(self, request: Any, service_public_key: str) -> None:
        """`service_public_key` is the id of the peer that is called: it embeds the key."""
        auth = request.auth
        auth.client_access_token.CopyFrom(self._current_token())
        auth.service_public_key = service_public_key.encode()
        auth.time = get_dht_time()
        auth.nonce = secrets.token_bytes(_NONCE_BYTES)
        auth.signature = self._sign(self._message(request, service_public_key))

    async def validate_request(self, request: Any) -> bool:
        auth = request.auth
        now = get_dht_time()
        if len(auth.nonce) != _NONCE_BYTES:
            return False
        peer = self._signer(auth.client_access_token, request, self._current_token().username, now)
        if peer is None:
            return False
        caller = CALLER.get("")
        if peer != caller:
            # Otherwise a peer could repeat what another one has said to it.
            self._refuse(caller, "it shows the certificate of another peer")
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
        auth.signature = self._sign(self._message(response, CALLER.get("")))

    async def validate_response(self, response: Any, request: Any) -> bool:
        auth, own = response.auth, self._current_token().username
        signer = self._signer(auth.service_access_token, response, own, get_dht_time())
        called = request.auth.service_public_key.decode()
        # The nonce ties the answer to this request: an answer to another one cannot be replayed.
        return signer == called and bytes(auth.nonce) == bytes(request.auth.nonce)

    def _signer(self, token: AccessToken, message: Any, receiver: str, now: float) -> str | None:
        """The certified peer that `token` belongs to and that signed `message` for `receiver`, unless it is
        banned.
        """
        try:
            certificate = certified_peer(token.public_key, self._authority)
        except ValueError as error:
            self._refuse(token.username[:64], str(error))
            return None
        peer = certificate.peer
        if peer in self.banned:
            self._refuse(peer, "it was banned")
        elif not certificate.holds_at(now):
            self._refuse(peer, "its certificate has expired")
        elif not is_signed_by(peer, self._message(message, receiver), message.auth.signature):
            self._refuse(peer, "it has not signed this message for this peer and this run")
        else:
            return peer
        return None

    def _refuse(self, peer: str, why: str) -> None:
        if self._refused.is_new(peer):
            log.warning("refused %r the DHT: %s", peer, why)

    def _current_token(self) -> AccessToken:
        written_at = self._path.stat().st_mtime_ns
        if written_at != self._written_at:
            der = x509.load_pem_x509_certificate(self._path.read_bytes()).public_bytes(Encoding.DER)
            peer = certified_peer(der, self._authority).peer
            self._token, self._written_at = AccessToken(username=peer, public_key=der), written_at
        return self._token

    def _message(self, message: Any, receiver: str) -> bytes:
        """The bytes to sign: type, run and receiver of the message, and the message without its signature."""
        unsigned = type(message)()
        unsigned.CopyFrom(message)
        unsigned.auth.ClearField("signature")
        body: bytes = unsigned.SerializeToString(deterministic=True)
        # The type keeps a signed request from being used as an answer of the same bytes.
        return f"hetnode dht {message.DESCRIPTOR.full_name} 2\n{self._run}\n{receiver}\n".encode() + body


def signer_of(identity: Path) -> Callable[[bytes], bytes]:
    """A function that signs with the ed25519 key of an identity file that the main process has checked."""
    # libp2p's form: 4 bytes of protobuf header, the 32-byte seed, the 32-byte public key.
    return Ed25519PrivateKey.from_private_bytes(identity.read_bytes()[4:36]).sign
