"""The run's private certificate authority: its files, and the certificates that it issues.

gRPC's TLS takes no ed25519 keys. So each node has a second key, EC P-256, and a certificate that binds this
key to its peer id.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ec import (
    SECP256R1,
    EllipticCurvePrivateKey,
    EllipticCurvePublicKey,
    generate_private_key,
)
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from protocol.errors import ErrorCode, HetnodeError
from protocol.spec.run import RunSpec
from protocol.trust.names import (
    COORDINATOR_NAME,
    COORDINATOR_URI,
    ENROLLMENT_NAME,
    OPERATOR_URI,
    peer_uri,
    tls_name,
)
from protocol.trust.private_file import FULL_DISK, write_private, write_whole
from protocol.trust.run_id import run_id_of
from protocol.trust.tls import AUTHORITY_EXTENSION, pin_of
from protocol.types import PeerId

log = logging.getLogger(__name__)

CERTIFICATE_SECONDS = 86400.0
"""Life of every certificate but the authority's own. Holders renew well before its end."""

_AUTHORITY_LIFE = timedelta(days=3652)
_CLOCK_SKEW = 3600.0
"""Certificates begin this long before their issue, for late clocks: at most a quarter of their life."""

_CLIENT, _SERVER = ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH


@dataclass(frozen=True)
class Authority:
    """Issues certificates. Open it with :func:`open_authority`; safe for concurrent use.

    Args:
        certificate: its own, self-signed.
        seconds: life of the certificates that it issues.
        clock: the wall clock, in seconds since 1970.
    """

    certificate: x509.Certificate
    key: EllipticCurvePrivateKey
    seconds: float
    clock: Callable[[], float] = time.time

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(Encoding.PEM)

    @property
    def pin(self) -> bytes:
        """The 32 bytes that name this authority in an invite."""
        return pin_of(self.certificate)

    def run_id(self, spec: RunSpec) -> str:
        """The id of the run of `spec` under this authority."""
        return run_id_of(spec, self.pin)

    def for_peer(self, peer: PeerId, key: EllipticCurvePublicKey) -> bytes:
        """PEM certificate that binds the TLS key `key` to `peer`, at both ends of a connection."""
        return self._issue(key, peer_uri(peer), (tls_name(peer),), (_CLIENT, _SERVER))

    def for_coordinator(self, key: EllipticCurvePublicKey) -> bytes:
        """PEM certificate for the coordinator's servers; it carries the authority's along."""
        names = COORDINATOR_NAME, ENROLLMENT_NAME
        return self._issue(key, COORDINATOR_URI, names, (_SERVER,), carries_authority=True)

    def for_operator(self, key: EllipticCurvePublicKey) -> bytes:
        """PEM certificate for the operator's tools."""
        return self._issue(key, OPERATOR_URI, (), (_CLIENT,))

    def _issue(
        self,
        key: EllipticCurvePublicKey,
        uri: str,
        dns: tuple[str, ...],
        usages: tuple[x509.ObjectIdentifier, ...],
        carries_authority: bool = False,
    ) -> bytes:
        now = datetime.fromtimestamp(self.clock(), UTC)
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(uri)]
        names += map(x509.DNSName, dns)
        # The critical name is the identity: every program of a run reads the holder from its URI.
        own_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([]))
            .issuer_name(self.certificate.subject)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(seconds=min(_CLOCK_SKEW, self.seconds / 4)))
            .not_valid_after(now + timedelta(seconds=self.seconds))
            .add_extension(x509.SubjectAlternativeName(names), critical=True)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(own_id, critical=False)
        )
        if carries_authority:
            # A newcomer knows only the pin: it reads the authority from this handshake and compares the two.
            der = self.certificate.public_bytes(Encoding.DER)
            carried = x509.UnrecognizedExtension(AUTHORITY_EXTENSION, der)
            builder = builder.add_extension(carried, critical=False)
        return builder.sign(self.key, hashes.SHA256()).public_bytes(Encoding.PEM)


class ServerCertificate:
    """The certificate of the coordinator's servers, replaced when half of its life is over.

    Args:
        peer: the holder as a peer; None for the coordinator as such.
    """

    def __init__(self, authority: Authority, peer: PeerId | None = None) -> None:
        self._authority, self._peer = authority, peer
        self._key = generate_private_key(SECP256R1())
        self._key_pem = _private_pem(self._key)
        self._issue()

    def pair(self) -> tuple[bytes, bytes]:
        """PEM key and certificate; at least half of its life is left."""
        # A clock that is set back must not leave a certificate that begins in the future.
        if not 0 <= self._authority.clock() - self._issued_at < self._authority.seconds / 2:
            self._issue()
        return self._key_pem, self._certificate

    def _issue(self) -> None:
        public = self._key.public_key()
        self._issued_at = self._authority.clock()
        if self._peer is None:
            self._certificate = self._authority.for_coordinator(public)
        else:
            self._certificate = self._authority.for_peer(self._peer, public)


def open_authority(
    folder: Path, run: str, seconds: float = CERTIFICATE_SECONDS, clock: Callable[[], float] = time.time
) -> Authority:
    """The authority in ``authority.key`` and ``authority.pem`` of `folder`, made on first use.

    Raises:
        HetnodeError: STORE_CORRUPT if the two cannot be used or do not belong together.
    """
    key_file, certificate_file = folder / "authority.key", folder / "authority.pem"
    with _file_errors(
        f"The run's authority in {folder} cannot be used",
        "Restore authority.key and authority.pem; without them only a new run is possible.",
    ):
        if not key_file.exists():
            key = generate_private_key(SECP256R1())
            certificate = _self_signed(key, run, datetime.fromtimestamp(clock(), UTC))
            write_whole(certificate_file, certificate.public_bytes(Encoding.PEM))
            # The key is written last: a folder without it has issued no certificate yet.
            write_private(key_file, _private_pem(key))
        key = _load_key(key_file)
        certificate = x509.load_pem_x509_certificate(certificate_file.read_bytes())
        if certificate.public_key() != key.public_key():
            raise ValueError("key and certificate do not belong together")
    return Authority(certificate, key, seconds, clock)


def write_operator(authority: Authority, folder: Path) -> None:
    """Write ``operator.key`` (once) and a new ``operator.pem`` into `folder`, for the operator's commands.

    Raises:
        HetnodeError: STORE_CORRUPT if they cannot be written.
    """
    key_file = folder / "operator.key"
    with _file_errors(
        f"The operator's certificate in {folder} cannot be written",
        "Check the disk; if operator.key is damaged, remove it.",
    ):
        if not key_file.exists():
            write_private(key_file, _private_pem(generate_private_key(SECP256R1())))
        write_private(folder / "operator.pem", authority.for_operator(_load_key(key_file).public_key()))


def write_bootstrap(authority: Authority, folder: Path, peer: PeerId) -> None:
    """Write a new ``bootstrap.pem`` into `folder`: the certificate of the coordinator's DHT peer.

    Raises:
        HetnodeError: STORE_CORRUPT if it cannot be written.
    """
    # The DHT peer proves its peer id, and opens no TLS connection: it needs no key of its certificate.
    unused = generate_private_key(SECP256R1()).public_key()
    with _file_errors(f"The DHT peer's certificate in {folder} cannot be written", "Check the disk."):
        write_private(folder / "bootstrap.pem", authority.for_peer(peer, unused))


@contextmanager
def _file_errors(cause: str, remedy: str) -> Iterator[None]:
    """Turn the errors of keys and certificates into STORE_CORRUPT, but for those of a full disk."""
    try:
        yield
    except (OSError, ValueError, TypeError) as error:
        if isinstance(error, OSError) and error.errno in FULL_DISK:
            raise
        raise HetnodeError(ErrorCode.STORE_CORRUPT, f"{cause}: {error}.", remedy) from None


def _load_key(path: Path) -> EllipticCurvePrivateKey:
    path.chmod(0o600)  # a copied folder may have lost its modes
    key = load_pem_private_key(path.read_bytes(), password=None)
    if not isinstance(key, EllipticCurvePrivateKey) or not isinstance(key.curve, SECP256R1):
        raise ValueError(f"{path.name} holds another kind of key than EC P-256")
    return key


def _private_pem(key: EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _self_signed(key: EllipticCurvePrivateKey, run: str, now: datetime) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"hetnode run {run}"[:64])])
    usage = x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(seconds=_CLOCK_SKEW))
        .not_valid_after(now + _AUTHORITY_LIFE)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )


async def renew_certificates(authority: Authority, folder: Path, peer: PeerId) -> None:
    """Renew the certificates of the operator and of the DHT peer `peer` until cancelled."""
    while True:
        # A failed renewal is repeated once before the certificate expires.
        await asyncio.sleep(authority.seconds / 3)
        try:
            write_operator(authority, folder)
            write_bootstrap(authority, folder, peer)
        except (HetnodeError, OSError) as error:
            log.error("the certificates were not renewed: %s", error)
