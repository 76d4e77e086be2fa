"""Publishes a peer's record in the DHT, from docs/protocol/minimum-peer.md alone.

    python -m tests.hostile.dht_record FILE

hivemind is the transport. It forks processes, so this is a program of its own. FILE is JSON: `identity` and
`certificate` name files, and `run`, `endpoint` and `dht_peers` are values. It prints "stored", and the peers
whose records it finds.
"""

from __future__ import annotations

import json
import secrets
import sys
import time
from pathlib import Path
from typing import Any

import hivemind.dht.node
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding
from hivemind import DHT
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID
from hivemind.proto.auth_pb2 import AccessToken
from hivemind.utils import get_dht_time
from hivemind.utils.auth import AuthorizerBase, AuthRole, AuthRPCWrapper

from tests.hostile import wire
from tests.hostile.wire import Identity, message

SECONDS = 60.0


class Authorizer(AuthorizerBase):  # type: ignore[misc]  # hivemind has no type information
    """Fills `auth` as section 12 says, and believes the bootstrap peer."""

    def __init__(self, run: str, identity: Identity, certificate: bytes) -> None:
        self._run, self._identity = run, identity
        self._token = AccessToken(username=identity.peer, public_key=certificate)

    async def sign_request(self, request: Any, called: str) -> None:
        request.auth.service_public_key = called.encode()
        request.auth.client_access_token.CopyFrom(self._token)
        request.auth.time = get_dht_time()
        request.auth.nonce = secrets.token_bytes(16)
        request.auth.signature = self._identity.key.sign(wire.dht_call(self._run, called, request))

    async def validate_request(self, request: Any) -> bool:
        return True

    async def sign_response(self, response: Any, request: Any) -> None:
        raise AssertionError("it only dials")

    async def validate_response(self, response: Any, request: Any) -> bool:
        auth = response.auth
        signature = auth.signature
        auth.ClearField("signature")
        called = request.auth.service_public_key.decode()
        wire.verify(called, wire.dht_call(self._run, self._identity.peer, response), signature)
        return bool(auth.nonce == request.auth.nonce)


class Protocol(DHTProtocol):  # type: ignore[misc]  # hivemind has no type information
    """hivemind's, which tells its authorizer the peer that it calls."""

    _rpc_handlers = _stub_type = None

    def get_stub(self, peer: PeerID) -> AuthRPCWrapper:
        stub = super(DHTProtocol, self).get_stub(self.p2p, peer)
        return AuthRPCWrapper(stub, AuthRole.CLIENT, self.authorizer, peer.to_base58())


Protocol.__name__ = DHTProtocol.__name__  # hivemind derives the names of calls from it


def sealed(run: str, identity: Identity, certificate: bytes, endpoint: str, expires: float) -> bytes:
    """A SignedRecord."""
    record = message("PeerRecord")(
        peer=identity.peer, protocol_version=wire.PROTOCOL_VERSION, role="stage", endpoint=endpoint
    ).SerializeToString(deterministic=True)
    made = message("SignedRecord")(record=record, expires=expires, certificate=certificate)
    made.signature = identity.key.sign(wire.record(run, record, expires))
    return bytes(made.SerializeToString())


def main() -> None:
    given = json.loads(Path(sys.argv[1]).read_text())
    file = Path(given["identity"])
    identity = Identity(Ed25519PrivateKey.from_private_bytes(file.read_bytes()[4:36]))
    pem = Path(given["certificate"]).read_bytes()
    certificate = x509.load_pem_x509_certificate(pem).public_bytes(Encoding.DER)
    hivemind.dht.node.DHTProtocol = Protocol
    dht = DHT(
        initial_peers=given["dht_peers"],
        start=True,
        client_mode=True,
        authorizer=Authorizer(given["run"], identity, certificate),
        identity_path=str(file),
        check_if_identity_free=False,
        node_id=DHTID.generate(source=identity.peer),
    )
    try:
        expires, key = time.time() + 900, f"{given['run']}.peers"
        value = sealed(given["run"], identity, certificate, given["endpoint"], expires)
        print("stored" if dht.store(key, value, expires, subkey=identity.peer) else "refused")
        found = dht.get(key, latest=True)
        for peer, entry in found.value.items() if found else ():
            signed = message("SignedRecord").FromString(entry.value)
            wire.verify(peer, wire.record(given["run"], signed.record, signed.expires), signed.signature)
            print(peer, message("PeerRecord").FromString(signed.record).endpoint)
    finally:
        dht.shutdown()


if __name__ == "__main__":
    main()
