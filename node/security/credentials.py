"""A node's certificate for a run: its files, and the time of its renewal.

The credentials of every run to which a node was invited are next to its identity ``NAME.key``::

    NAME.runs/RUN/key.pem          private TLS key, EC P-256, mode 0600
                  certificate.pem  binds that key to the identity's peer id; short-lived
                  authority.pem    of the run's authority, believed by both ends of every connection
                  run.json         address and peer id of the coordinator
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from protocol.errors import ErrorCode, HetnodeError
from protocol.types import PeerId, Role

_LEAST_WAIT = 1.0  # seconds between two attempts to renew
_KEY, _CERTIFICATE, _AUTHORITY, _RUN = "key.pem", "certificate.pem", "authority.pem", "run.json"


@dataclass(frozen=True)
class Credentials:
    """One end of mutual TLS, in PEM: the authority that it trusts, its certificate, and its private key."""

    authority: bytes
    certificate: bytes
    key: bytes = field(repr=False)

    @property
    def public_key(self) -> bytes:
        """DER SubjectPublicKeyInfo of the key."""
        key = load_pem_private_key(self.key, None)
        return key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)

    @property
    def expires(self) -> float:
        """Unix time at which the certificate ends."""
        return x509.load_pem_x509_certificate(self.certificate).not_valid_after_utc.timestamp()

    def seconds_to_renewal(self, now: float) -> float:
        """Seconds to wait, at Unix time `now`, before the next renewal.

        It is two thirds of the remaining time, so failed attempts are repeated more often towards the end.
        """
        return max(_LEAST_WAIT, (self.expires - now) * 2 / 3)


@dataclass(frozen=True)
class RunCredentials:
    """A node's credentials for one run.

    Attributes:
        folder: where the files are.
        api: ``host:port`` of the coordinator's API.
        coordinator: peer id of the key that must sign specs and plans.
        role: the node's last role, or the only role that its invite allows, or None.
    """

    folder: Path
    run: str
    api: str
    coordinator: PeerId
    role: Role | None
    tls: Credentials

    def save(self) -> None:
        """Write all files. Only their owner can read them."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _write(self.folder / _KEY, self.tls.key)
        _write(self.folder / _AUTHORITY, self.tls.authority)
        self._save_run()
        _write(self.folder / _CERTIFICATE, self.tls.certificate)  # last: it marks the folder as complete

    def _save_run(self) -> None:
        body = {"run": self.run, "api": self.api, "coordinator": self.coordinator, "role": self.role}
        _write(self.folder / _RUN, json.dumps(body, indent=2).encode())

    def remember(self, role: Role) -> None:
        """Store this node's role for its next start."""
        replace(self, role=role)._save_run()

    @property
    def certificate_file(self) -> Path:
        return self.folder / _CERTIFICATE

    @property
    def authority_file(self) -> Path:
        return self.folder / _AUTHORITY

    def renewed(self, certificate: bytes) -> RunCredentials:
        """These credentials with a new certificate for the same key, which is stored in the folder."""
        _write(self.certificate_file, certificate)
        return replace(self, tls=replace(self.tls, certificate=certificate))


def new_tls_key() -> bytes:
    """A new private EC P-256 key, PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def folder_of(identity: Path, run: str) -> Path:
    """The folder with the credentials of the identity file `identity` for `run`."""
    return identity.with_suffix(".runs") / run


def load(folder: Path) -> RunCredentials:
    """The credentials in `folder`.

    Raises:
        HetnodeError: NO_CREDENTIALS if they are missing or damaged.
    """
    try:
        body = json.loads((folder / _RUN).read_bytes())
        tls = Credentials(
            *((folder / name).read_bytes() for name in (_AUTHORITY, _CERTIFICATE, _KEY)),
        )
        _ = tls.expires, tls.public_key  # reading them raises ValueError if a file is damaged
        role = Role(body["role"]) if body["role"] else None
        coordinator = PeerId(body["coordinator"])
        return RunCredentials(folder, str(body["run"]), str(body["api"]), coordinator, role, tls)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise HetnodeError(
            ErrorCode.NO_CREDENTIALS,
            f"There are no usable credentials in {folder}: {error}.",
            "Ask the run's operator for an invite and type 'hetnode join INVITE'.",
        ) from None


def exist(folder: Path) -> bool:
    """Whether `folder` holds credentials."""
    return (folder / _CERTIFICATE).exists()


def check_in_date(credentials: RunCredentials, now: float) -> None:
    """Raises HetnodeError CERTIFICATE_REFUSED if the certificate expired while this node was away."""
    if now >= credentials.tls.expires:
        raise HetnodeError(
            ErrorCode.CERTIFICATE_REFUSED,
            f"This node's certificate for run {credentials.run} has expired; a node renews it while it runs.",
            "Ask the run's operator for an invite and type 'hetnode join INVITE'.",
        )


def load_operator(folder: Path) -> tuple[str, Credentials]:
    """The API address and the operator's credentials that a coordinator keeps in its folder.

    Raises:
        HetnodeError: NO_CREDENTIALS if they are missing.
    """
    try:
        address = (folder / "address").read_text().strip()
        names = ("authority.pem", "operator.pem", "operator.key")
        return address, Credentials(*((folder / name).read_bytes() for name in names))
    except OSError as error:
        raise HetnodeError(
            ErrorCode.NO_CREDENTIALS,
            f"{folder} is not the folder of a coordinator that runs: {error}.",
            "Give the --folder of 'hetnode coordinator', as the user who started it.",
        ) from None


def _write(path: Path, data: bytes) -> None:
    """Replace `path` in one step. The file has mode 0600 before any byte of it is written."""
    temporary = path.with_suffix(".tmp")
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())  # before the rename: a crash must not leave an empty file under the name
    temporary.replace(path)
