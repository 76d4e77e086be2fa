"""A node's certificate for a run: its files, and the time of its renewal.

The credentials of every run to which a node was invited are next to its identity ``NAME.key``::

    NAME.runs/RUN/key.pem          private TLS key, EC P-256, mode 0600
                  certificate.pem  binds that key to the identity's peer id; short-lived
                  authority.pem    of the run's authority, believed by both ends of every connection
                  run.json         address and peer id of the coordinator
"""

from __future__ import annotations

import hashlib
import json
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from ssl import PEM_cert_to_DER_cert
from typing import TYPE_CHECKING, Any

from protocol.errors import ErrorCode, HetnodeError
from protocol.trust.private_file import write_private
from protocol.trust.run_id import names_authority
from protocol.types import PeerId, Role

if TYPE_CHECKING:
    from protocol.trust.term import Succession

_LEAST_WAIT = 1.0  # seconds between two attempts to renew
_MOST_OTHERS = 4  # addresses: a start tries each of them
_KEY, _CERTIFICATE, _AUTHORITY, _RUN = "key.pem", "certificate.pem", "authority.pem", "run.json"


@dataclass(frozen=True)
class Credentials:
    """One end of mutual TLS, in PEM: the authority that it trusts, its certificate, and its private key.

    `term`: the proof of the newest term (protocol.trust.term) that this end knows, shown to coordinators.
    """

    authority: bytes
    certificate: bytes
    key: bytes = field(repr=False)
    term: bytes = b""

    # Short commands only hand the files to gRPC: cryptography would take a third of their time.

    @property
    def public_key(self) -> bytes:
        """DER SubjectPublicKeyInfo of the key."""
        from cryptography.hazmat.primitives import serialization as form  # noqa: PLC0415

        key = form.load_pem_private_key(self.key, None)
        return key.public_key().public_bytes(form.Encoding.DER, form.PublicFormat.SubjectPublicKeyInfo)

    @property
    def pin(self) -> bytes:
        """Pin of the authority. Raises ValueError if `authority` is no PEM."""
        return hashlib.sha256(PEM_cert_to_DER_cert(self.authority.decode())).digest()

    @property
    def expires(self) -> float:
        """Unix time at which the certificate ends."""
        from cryptography import x509  # noqa: PLC0415

        return x509.load_pem_x509_certificate(self.certificate).not_valid_after_utc.timestamp()

    def seconds_to_renewal(self, now: float) -> float:
        """Seconds to wait, at Unix time `now`, before the next renewal.

        It is two thirds of the remaining time, so failed attempts are repeated more often towards the end.
        """
        return max(_LEAST_WAIT, (self.expires - now) * 2 / 3)


@dataclass(frozen=True)
class RunCredentials:
    """A node's credentials for one run, whose files are in `folder`.

    Attributes:
        api: ``host:port`` of the coordinator's API.
        coordinator: peer id of the key that must sign specs and plans.
        role: the last role that the node's owner chose, or the only one that its invite allows, or None.
        name: the public name that the node's owner chose last, or "".
        others: where the coordinator may be if it does not answer at `api`.
    """

    folder: Path
    run: str
    api: str
    coordinator: PeerId
    role: Role | None
    tls: Credentials
    name: str = ""
    others: tuple[str, ...] = ()

    def save(self) -> None:
        """Write all files. Only their owner can read them."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_private(self.folder / _KEY, self.tls.key)
        write_private(self.folder / _AUTHORITY, self.tls.authority)
        self._save_run()
        # Last, because it marks the folder as complete.
        write_private(self.folder / _CERTIFICATE, self.tls.certificate)

    def _save_run(self) -> None:
        body: dict[str, Any] = {"run": self.run, "api": self.api}
        body |= {"coordinator": self.coordinator, "role": self.role}
        body |= {"name": self.name} if self.name else {}
        body |= {"others": self.others} if self.others else {}
        body |= {"term": self.tls.term.hex()} if self.tls.term else {}
        write_private(self.folder / _RUN, json.dumps(body, indent=2).encode())

    def remember(self, role: Role | None, name: str = "") -> None:
        """Store what this node's owner wants, for its next start. `role` None: the coordinator chooses."""
        replace(self, role=role, name=name)._save_run()

    def moved(self, api: str) -> RunCredentials:
        """These credentials with another address of the coordinator, which is stored in the folder."""
        others = self.api, *(each for each in self.others if each != api)
        return self._changed(api=api, others=others[:_MOST_OTHERS])

    def told(self, succession: Succession) -> RunCredentials:
        """These credentials with what their coordinator tells of its term and of others, which is stored.

        A proof of an earlier term, or one that no coordinator of the run has signed, changes no term.
        """
        from protocol.trust.term import is_proof, term_in  # noqa: PLC0415

        term, others = self.tls.term, tuple(each for each in succession.others if each != self.api)
        if term_in(succession.term) > term_in(term) and is_proof(succession.term, self.run, self.coordinator):
            term = succession.term
        if (others or self.others, term) == (self.others, self.tls.term):
            return self
        return self._changed(others=others or self.others, tls=replace(self.tls, term=term))

    def _changed(self, **changes: Any) -> RunCredentials:
        replace(load(self.folder), **changes)._save_run()  # role and name may have been remembered since
        return replace(self, **changes)

    @property
    def is_of_relay(self) -> bool:
        return self.role is Role.RELAY

    @property
    def certificate_file(self) -> Path:
        return self.folder / _CERTIFICATE

    @property
    def key_file(self) -> Path:
        return self.folder / _KEY

    @property
    def authority_file(self) -> Path:
        return self.folder / _AUTHORITY

    def renewed(self, certificate: bytes) -> RunCredentials:
        """These credentials with a new certificate for the same key, which is stored in the folder."""
        write_private(self.certificate_file, certificate)
        return replace(self, tls=replace(self.tls, certificate=certificate))


def new_tls_key() -> bytes:
    """A new private EC P-256 key, PEM."""
    from cryptography.hazmat.primitives import serialization as form  # noqa: PLC0415
    from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415

    key = ec.generate_private_key(ec.SECP256R1())
    return key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())


def folder_of(identity: Path, run: str) -> Path:
    """The folder with the credentials of the identity file `identity` for `run`."""
    return identity.with_suffix(".runs") / run


def load(folder: Path) -> RunCredentials:
    """The credentials in `folder`. Raises NO_CREDENTIALS if they are missing or damaged."""
    try:
        body = json.loads((folder / _RUN).read_bytes())
        tls = Credentials(*((folder / name).read_bytes() for name in (_AUTHORITY, _CERTIFICATE, _KEY)))
        _ = tls.expires, tls.public_key  # reading them raises ValueError if a file is damaged
        role = Role(body["role"]) if body["role"] else None
        coordinator = PeerId(body["coordinator"])
        tls = replace(tls, term=bytes.fromhex(body.get("term", "")))
        found = folder, str(body["run"]), str(body["api"]), coordinator, role, tls
        return RunCredentials(*found, str(body.get("name", "")), tuple(map(str, body.get("others", ()))))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise HetnodeError(
            ErrorCode.NO_CREDENTIALS,
            f"There are no usable credentials in {folder}: {error}.",
            "Ask the run's operator for an invite and type 'hetnode join INVITE'.",
        ) from None


def of_authority(identity: Path, pin: bytes) -> RunCredentials | None:
    """What the identity file `identity` holds for the run of the authority with this pin, in date or not.

    None where there is nothing, or it is damaged.
    """
    for folder in sorted(identity.with_suffix(".runs").glob("*")):
        if names_authority(folder.name, pin) and exist(folder):
            with suppress(HetnodeError):
                found = load(folder)
                if found.tls.pin == pin:
                    return found
    return None


def exist(folder: Path) -> bool:
    """Whether `folder` holds credentials."""
    return (folder / _CERTIFICATE).exists()


def stamp(seconds: float) -> str:
    """A Unix time for people."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


def check_in_date(credentials: RunCredentials, now: float) -> None:
    """Raises HetnodeError CERTIFICATE_REFUSED if the certificate expired while this node was away."""
    if now >= credentials.tls.expires:
        raise HetnodeError(
            ErrorCode.CERTIFICATE_REFUSED,
            f"This node's certificate for run {credentials.run} has expired at "
            f"{stamp(credentials.tls.expires)}, and the clock of this machine says {stamp(now)}.",
            "If the clock is wrong, set it. Else ask the operator for an invite: 'hetnode join INVITE'.",
        )


def operator_tls(folder: Path) -> Credentials:
    """The operator's credentials in a coordinator's folder. Raises OSError."""
    names = ("authority.pem", "operator.pem", "operator.key")
    return Credentials(*((folder / name).read_bytes() for name in names))


def load_operator(folder: Path) -> tuple[str, Credentials]:
    """API address and operator's credentials from a coordinator's folder. Raises NO_CREDENTIALS."""
    try:
        return (folder / "address").read_text().strip(), operator_tls(folder)
    except OSError as error:
        raise HetnodeError(
            ErrorCode.NO_CREDENTIALS,
            f"{folder} is not the folder of a coordinator that runs: {error}.",
            "Give the --folder of 'hetnode coordinator', as the user who started it.",
        ) from None
