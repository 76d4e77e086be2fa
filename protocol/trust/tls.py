"""Certificates: their content, and how a new peer verifies the authority of a run.

gRPC accepts no ed25519 certificates, so a certificate binds an EC P-256 key to its holder's ed25519 peer id.
:mod:`protocol.trust.names` has the names in it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePublicKey
from cryptography.hazmat.primitives.serialization import Encoding, load_der_public_key

from protocol.trust.names import peer_of, wrong_authority
from protocol.types import PeerId

AUTHORITY_EXTENSION = x509.ObjectIdentifier("2.25.31063534994493156204315036349397164680")
"""In the coordinator's certificate: the authority's (DER), so that a new peer can compare it with its pin.

The OID is a random UUID (X.667).
"""

MAX_CERTIFICATE_BYTES = 8192
MAX_KEY_BYTES = 256

_BAD_EXTENSION = (x509.ExtensionNotFound, x509.DuplicateExtension, x509.UnsupportedGeneralNameType)


def pin_of(authority: x509.Certificate) -> bytes:
    """sha-256 of the authority's DER certificate, as invites carry it."""
    return hashlib.sha256(authority.public_bytes(Encoding.DER)).digest()


def authority_of(leaf: bytes, pin: bytes) -> x509.Certificate:
    """The authority in the DER certificate of a coordinator. Raises WRONG_AUTHORITY unless it has the pin.

    Nothing in `leaf` itself is trusted: TLS verifies it against the returned certificate.
    """
    try:
        found = _carried_authority(leaf)
    except ValueError as error:
        raise wrong_authority(f"What answers there is no coordinator, by its certificate: {error}.") from None
    if pin_of(found) != pin:
        raise wrong_authority("What answers there belongs to another authority than the invite names.")
    return found


def _carried_authority(leaf: bytes) -> x509.Certificate:
    if len(leaf) > MAX_CERTIFICATE_BYTES:
        raise ValueError(f"it has {len(leaf)} bytes")
    try:
        extension = _certificate_from_der(leaf).extensions.get_extension_for_oid(AUTHORITY_EXTENSION)
    except _BAD_EXTENSION:
        raise ValueError("it carries no authority") from None
    assert isinstance(extension.value, x509.UnrecognizedExtension)
    return _certificate_from_der(extension.value.value)


def _certificate_from_der(data: bytes) -> x509.Certificate:
    try:
        return x509.load_der_x509_certificate(data)
    except x509.InvalidVersion as error:
        raise ValueError(str(error)) from None


def tls_key_from_der(data: bytes) -> EllipticCurvePublicKey:
    """The public key of a DER SubjectPublicKeyInfo. ValueError unless it is of the curve P-256."""
    if len(data) > MAX_KEY_BYTES:
        raise ValueError(f"a public key of {len(data)} bytes")
    try:
        key = load_der_public_key(data)
    except Exception as error:  # cryptography raises four kinds for bytes that are no key
        raise ValueError(f"no public key ({type(error).__name__})") from None
    if not isinstance(key, EllipticCurvePublicKey) or not isinstance(key.curve, SECP256R1):
        raise ValueError("a public key of another kind than EC P-256")
    return key


@dataclass(frozen=True)
class PeerCertificate:
    """The content of a peer's certificate: the peer, and the Unix times between which it is valid."""

    peer: PeerId
    begins: float
    ends: float

    def holds_at(self, now: float) -> bool:
        return self.begins <= now <= self.ends


@lru_cache(maxsize=4096)
def certified_peer(certificate: bytes, authority: x509.Certificate) -> PeerCertificate:
    """The content of the DER `certificate`, verified here because TLS does not see it.

    Raises ValueError if it is malformed, not signed by `authority`, or not a peer's.
    """
    if len(certificate) > MAX_CERTIFICATE_BYTES:
        raise ValueError(f"a certificate of {len(certificate)} bytes")
    leaf = _certificate_from_der(certificate)
    try:
        leaf.verify_directly_issued_by(authority)
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (InvalidSignature, UnsupportedAlgorithm, TypeError):
        raise ValueError("a certificate that the authority has not signed") from None
    except _BAD_EXTENSION as error:
        raise ValueError(str(error)) from None
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    peer = peer_of(uris[0]) if len(uris) == 1 else None
    if peer is None:
        raise ValueError("a certificate that names no peer")
    return PeerCertificate(peer, leaf.not_valid_before_utc.timestamp(), leaf.not_valid_after_utc.timestamp())
