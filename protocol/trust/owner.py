"""Owners: a person's key, to which the credit of all that person's nodes belongs.

A binding says in one run whose a node is. The owner's key and the node's sign it, so nobody gets the node of
another, nor the name of one; the id of the run is in it, so it is not valid in another run. A node that has
an owner goes to another only with the signature of the former one.

A key follows from a phrase of 16 random bytes, which a person can write down: their base32, with 4 bytes of
a checksum, in groups of four letters.
"""

from __future__ import annotations

import base64
import hashlib

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from protocol.trust.envelope import Signer, is_signed_by, peer_id_of
from protocol.trust.owner_binding import OwnerBinding
from protocol.types import PeerId

SECRET_BYTES, _CHECK_BYTES = 16, 4
_MISREAD = str.maketrans({"0": "O", "1": "I", "8": "B", "-": None, " ": None})


def binding_message(run: str, peer: str, owner: str) -> bytes:
    """The bytes that `owner` and `peer` sign."""
    return b"hetnode owner 1\n" + f"{run}\n{peer}\n{owner}".encode()


def release_message(run: str, peer: str, owner: str) -> bytes:
    """The bytes that the former owner of `peer` signs to let it go to `owner`."""
    return b"hetnode owner release 1\n" + f"{run}\n{peer}\n{owner}".encode()


def is_bound(binding: OwnerBinding, run: str) -> bool:
    """Whether both sides have signed the binding for `run`."""
    message = binding_message(run, binding.peer, binding.owner)
    signed = (binding.owner, binding.owner_signature), (binding.peer, binding.peer_signature)
    return all(is_signed_by(each, message, signature) for each, signature in signed)


def is_released(binding: OwnerBinding, run: str, former: str) -> bool:
    """Whether `former` lets the node of the binding go."""
    return is_signed_by(former, release_message(run, binding.peer, binding.owner), binding.release)


class OwnerKey:
    """The key of a phrase. `secret` is SECRET_BYTES random bytes."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._key = Ed25519PrivateKey.from_private_bytes(
            hashlib.sha256(b"hetnode owner key 1\n" + secret).digest()
        )
        self.owner: PeerId = peer_id_of(self._key.public_key().public_bytes_raw())

    @classmethod
    def read(cls, phrase: str) -> OwnerKey:
        """The key of a phrase that a person may have typed. ValueError if a letter is wrong."""
        try:
            data = base64.b32decode("".join(phrase.upper().split()).translate(_MISREAD))
        except ValueError:
            data = b""
        secret = data[:SECRET_BYTES]
        if len(data) != SECRET_BYTES + _CHECK_BYTES or data != secret + _check(secret):
            raise ValueError("it has 8 groups of 4 letters and digits, and one of these is wrong or missing")
        return cls(secret)

    @property
    def phrase(self) -> str:
        """As ``ABCD-EFGH-...``; a secret."""
        letters = base64.b32encode(self._secret + _check(self._secret)).decode()
        return "-".join(letters[at : at + 4] for at in range(0, len(letters), 4))

    def bind(self, run: str, peer: PeerId, sign: Signer, former: OwnerKey | None = None) -> OwnerBinding:
        """A binding of `peer`, whose key `sign` has, released by the `former` owner if there is one."""
        message = binding_message(run, peer, self.owner)
        release = former.sign(release_message(run, peer, self.owner)) if former is not None else b""
        return OwnerBinding(peer, self.owner, self.sign(message), sign(message), release)

    def sign(self, message: bytes) -> bytes:
        """ed25519 signature, 64 bytes."""
        return self._key.sign(message)


def _check(secret: bytes) -> bytes:
    return hashlib.sha256(b"hetnode owner phrase 1\n" + secret).digest()[:_CHECK_BYTES]
