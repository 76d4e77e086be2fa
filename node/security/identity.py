"""A node's identity: one ed25519 key in a file. Its peer id, records and payloads use it."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterable
from contextlib import suppress
from itertools import chain, count
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from protocol.errors import ErrorCode, HetnodeError
from protocol.trust.envelope import peer_id_of
from protocol.trust.private_file import without_locks
from protocol.types import PeerId

# protobuf PrivateKey{Type: Ed25519, Data: 32-byte seed followed by the 32-byte public key}
_FILE_PREFIX = bytes((0x08, 0x01, 0x12, 0x40))


class Identity:
    """An ed25519 key that only this process uses: its file is locked until the process ends."""

    def __init__(self, path: Path, key: Ed25519PrivateKey, lock: int) -> None:
        self.path = path
        self._key = key
        self.lock = lock  # the open descriptor that holds the lock
        self.peer: PeerId = peer_id_of(_public_bytes(key))

    def sign(self, message: bytes) -> bytes:
        """ed25519 signature, 64 bytes."""
        return self._key.sign(message)


def open_identity(path: Path) -> Identity:
    """Load the key at `path`, or create it (mode 0600) on first use, and lock it for this process.

    Raises HetnodeError: ALREADY_ACTIVE if another live process uses it; BAD_OPTION if it cannot be read.
    """
    identity = _try_open(path)
    if identity is None:
        raise HetnodeError(
            ErrorCode.ALREADY_ACTIVE,
            f"The identity {path} is in use by another process on this machine.",
            "Stop that node, or give this one another --identity.",
        )
    return identity


def peer_in(path: Path) -> PeerId:
    """The peer id of the key at `path`, which another process may use. Raises BAD_OPTION."""
    try:
        key = _parse(path.read_bytes()[:1024])
    except OSError as error:
        raise _unreadable(path, str(error)) from None
    if key is None:
        raise _unreadable(path, "it does not hold an ed25519 key and its public half")
    return peer_id_of(_public_bytes(key))


def open_free_identity(folder: Path, preferred: Iterable[Path] = ()) -> Identity:
    """The first of `preferred` that no live process uses, else the first such ``peer-N.key`` of `folder`.

    So nodes can share a machine.
    """
    paths = chain(preferred, (folder / f"peer-{i}.key" for i in count()))
    opened = (_try_open(path) for path in paths)
    return next(identity for identity in opened if identity is not None)


def is_in_use(path: Path) -> bool:
    """Whether a live process has the identity of this key file."""
    with suppress(OSError), path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _try_open(path: Path) -> Identity | None:
    """None if another process holds the lock."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _unreadable(path, str(error)) from None
    try:
        # The kernel releases this lock when the process ends, even after SIGKILL.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno != errno.EAGAIN:
            raise without_locks(path, error) from None
        return None
    # Read under the lock: another process may just have created the key.
    data = os.pread(descriptor, 1024, 0)
    if not data:
        key = Ed25519PrivateKey.generate()
        data = _FILE_PREFIX + key.private_bytes_raw() + _public_bytes(key)
        os.pwrite(descriptor, data, 0)
        os.fsync(descriptor)
    parsed = _parse(data)
    if parsed is None:
        os.close(descriptor)
        raise _unreadable(path, "it does not hold an ed25519 key and its public half")
    os.fchmod(descriptor, 0o600)
    return Identity(path, parsed, descriptor)


def _parse(data: bytes) -> Ed25519PrivateKey | None:
    """The key in a file's bytes; None if they have another form or the public half does not fit the seed."""
    if len(data) != 68 or not data.startswith(_FILE_PREFIX):
        return None
    key = Ed25519PrivateKey.from_private_bytes(data[4:36])
    return key if _public_bytes(key) == data[36:] else None


def _public_bytes(key: Ed25519PrivateKey) -> bytes:
    return key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)


def _unreadable(path: Path, why: str) -> HetnodeError:
    return HetnodeError(
        ErrorCode.BAD_OPTION,
        f"The identity file {path} cannot be used: {why}.",
        "Give another --identity, or remove the file to create a new identity.",
    )
