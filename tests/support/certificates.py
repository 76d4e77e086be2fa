"""Certificates as a coordinator would issue them, and what holds them."""

from __future__ import annotations

import datetime
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from coordinator.authority import Authority, open_authority
from node.security.credentials import Credentials, RunCredentials, folder_of, new_tls_key
from node.security.identity import Identity
from protocol.trust.tls import tls_key_from_der
from protocol.types import PeerId


@cache
def authority(name: str = "test-run") -> Authority:
    """The same for the same name."""
    with TemporaryDirectory() as folder:
        return open_authority(Path(folder), name)


def credentials(peer: str, issuer: Authority | None = None, ended: bool = False) -> Credentials:
    """TLS credentials of `peer`; it believes the authority that issued them.

    Args:
        ended: the certificate's time has been over for a minute.
    """
    issuer = issuer or authority()
    if ended:
        issuer = replace(issuer, seconds=60.0, clock=lambda: time.time() - 120.0)
    blank = Credentials(issuer.pem, b"", new_tls_key())
    certificate = issuer.for_peer(PeerId(peer), tls_key_from_der(blank.public_key))
    return replace(blank, certificate=certificate)


def enrolled(
    identity: Identity, run: str, coordinator: str = "coordinator", issuer: Authority | None = None
) -> RunCredentials:
    """Credentials of `identity` for `run`, saved where a node looks for them."""
    folder = folder_of(identity.path, run)
    result = RunCredentials(
        folder, run, "127.0.0.1:9", PeerId(coordinator), None, credentials(identity.peer, issuer)
    )
    result.save()
    return result


def self_signed(name: str, folder: Path) -> tuple[Path, Path]:
    """Files with the key and the certificate of a web server of this name, which nobody else has signed."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    files = folder / "web.key", folder / "web.pem"
    files[0].write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    files[1].write_bytes(certificate.public_bytes(Encoding.PEM))
    return files
