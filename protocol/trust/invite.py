"""An invite: one string with all that a new peer needs, a secret that admits it included.

``hetnode1-`` and base64url, without padding, of::

    pin 32 | id 6 | secret 16 | length 1, API address | length 1, enrollment address | checksum 4

The checksum is the start of the sha-256 of the rest. It tells a copying error from an attack.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import re
from dataclasses import dataclass, field

from protocol.errors import ErrorCode, HetnodeError
from protocol.trust.host_port import split_host_port

PREFIX = "hetnode1-"
PIN_BYTES = 32
ID_BYTES = 6
SECRET_BYTES = 16
MAX_TEXT = 1000
OPEN_INVITE = "0" * 2 * ID_BYTES
"""The id of the invite that an open run publishes. Its secret is known to all."""
_CHECKSUM_BYTES = 4
_MAX_ADDRESS = 255
_LIKE_AN_INVITE = re.compile(r"hetnode(1-|[0-9]+-.{70})", re.IGNORECASE)


@dataclass(frozen=True)
class Invite:
    """The addresses of a coordinator, the pin of its authority, and the secret that admits a new peer.

    Args:
        api: ``host:port`` of the coordinator's API.
        enrollment: ``host:port`` of the enrollment service, which issues certificates.
        pin: sha-256 of the DER certificate of the run's authority.
        id: names the invite in lists and logs; 12 hexadecimal digits, not secret.
        secret: 16 random bytes. Kept out of `repr`.
    """

    api: str
    enrollment: str
    pin: bytes
    id: str
    secret: bytes = field(repr=False)

    def encode(self) -> str:
        """The string that :func:`decode` reads. Raises ValueError for a field of a wrong size."""
        body = _sized(self.pin, PIN_BYTES) + _sized(bytes.fromhex(self.id), ID_BYTES)
        body += _sized(self.secret, SECRET_BYTES)
        body += _address_bytes(self.api) + _address_bytes(self.enrollment)
        return PREFIX + base64.urlsafe_b64encode(body + _checksum(body)).decode().rstrip("=")


def open_invite(api: str, enrollment: str, pin: bytes) -> Invite:
    """The invite of an open run, for everyone."""
    return Invite(api, enrollment, pin, OPEN_INVITE, bytes(SECRET_BYTES))


def is_invite(text: str) -> bool:
    """Whether `text` looks like an invite, which is secret, and not like the name of a run.

    Also one in other letters, or of a later version: no message may quote it.
    """
    return _LIKE_AN_INVITE.match(_bare(text)) is not None


def _bare(text: str) -> str:
    return text.strip().removeprefix("\ufeff").strip()


def decode(text: str) -> Invite:
    """The invite in `text`; white space around it is allowed, and a mark of its encoding before it.

    Raises BAD_INVITE for any other text.
    """
    try:
        return _decode(_bare(text))
    except ValueError as error:
        # The message must not quote the text: it may be a secret with one wrong letter.
        raise HetnodeError(
            ErrorCode.BAD_INVITE,
            f"This is not an invite: {error}.",
            "Copy the whole line that 'hetnode invite create' printed, from 'hetnode1-' to its end.",
        ) from None


def _decode(text: str) -> Invite:
    if not text.startswith(PREFIX):
        raise ValueError(f"it does not begin with '{PREFIX}'")
    if len(text) > MAX_TEXT:
        raise ValueError(f"it has {len(text)} characters, more than {MAX_TEXT}")
    encoded = text.removeprefix(PREFIX)
    try:
        data = base64.b64decode(encoded + "=" * (-len(encoded) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("it has characters that no invite has, or too few of them") from None
    body, checksum = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
    if checksum != _checksum(body):
        raise ValueError("a part of it is missing or was changed")
    stream = io.BytesIO(body)
    pin, id, secret = map(stream.read, (PIN_BYTES, ID_BYTES, SECRET_BYTES))
    api, enrollment = _read_address(stream), _read_address(stream)
    invite = Invite(api, enrollment, pin, id.hex(), secret)
    # base64 can spell the same bytes in several ways; only the one of encode() is valid.
    if invite.encode() != text:
        raise ValueError("it holds more than an invite")
    return invite


def _sized(value: bytes, size: int) -> bytes:
    if len(value) != size:
        raise ValueError(f"{len(value)} bytes where an invite has {size}")
    return value


def _address_bytes(address: str) -> bytes:
    try:
        split_host_port(address if address.isprintable() else "")
    except ValueError:
        raise ValueError("an address in it is not host:port") from None
    data = address.encode()
    if len(data) > _MAX_ADDRESS:
        raise ValueError(f"an address in it has {len(data)} bytes, more than {_MAX_ADDRESS}")
    return bytes((len(data),)) + data


def _read_address(stream: io.BytesIO) -> str:
    size = int.from_bytes(stream.read(1))
    data = stream.read(size)
    if len(data) < size:
        raise ValueError("it is too short")
    return data.decode()


def _checksum(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()[:_CHECKSUM_BYTES]
