"""The owner's key on this machine: its phrase in a file that its user alone can read."""

from __future__ import annotations

import secrets
from pathlib import Path

from platformdirs import user_config_path

from protocol.errors import ErrorCode, HetnodeError
from protocol.trust.owner import SECRET_BYTES, OwnerKey
from protocol.trust.private_file import write_private

_MOST_BYTES = 1024


def owner_file() -> Path:
    """Where the owner's phrase is, for all nodes of this user."""
    return user_config_path("hetnode") / "owner"


def former_file(file: Path) -> Path:
    """Where the phrase is that was in `file` before another one was recovered."""
    return file.with_name(f"{file.name}.former")


def load_owner(file: Path) -> OwnerKey | None:
    """The key in `file`; None where there is no such file. Raises BAD_OPTION for another content."""
    try:
        with file.open(errors="replace") as opened:
            return OwnerKey.read(opened.read(_MOST_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise HetnodeError(
            ErrorCode.BAD_OPTION,
            f"The owner's phrase in {file} cannot be read: {error}.",
            "Write it again with 'hetnode owner --recover'.",
        ) from None


def new_owner() -> OwnerKey:
    """A key that nobody had before."""
    return OwnerKey(secrets.token_bytes(SECRET_BYTES))


def keep_owner(key: OwnerKey, file: Path) -> None:
    """Write the phrase of `key` to `file`; that of another key goes to :func:`former_file`.

    Raises OSError, and as :func:`load_owner`.
    """
    known = load_owner(file)
    if known is not None and known.owner == key.owner:
        return
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if known is not None:
        write_private(former_file(file), f"{known.phrase}\n".encode())
    write_private(file, f"{key.phrase}\n".encode())
