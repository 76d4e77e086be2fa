"""A payload as it is handed from process to process of one machine: by its hash and its file."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from protocol.errors import ErrorCode, HetnodeError
from protocol.wire.record_codec import Blob


def sha256_of(payload: bytes) -> str:
    """The hash (hex) that names a payload."""
    return hashlib.sha256(payload).hexdigest()


@dataclass(frozen=True)
class StoredPayload:
    """A payload, or the result of a group, that this machine has.

    Attributes:
        path: its file, which lives until the round is over.
        data: its bytes, only where no file has them. Without both it is the proposal that a worker has made
            itself and still knows.
    """

    sha256: str
    path: Path | None = None
    data: Blob | None = None

    def read(self, most: int) -> bytes:
        """The bytes, `most` of them at most, whose hash is right.

        Raises HetnodeError PAYLOAD_UNAVAILABLE: the disk has lost or changed them since they came.
        """
        try:
            found = self.data if self.path is None else _first_bytes(self.path, most + 1)
        except OSError as error:
            raise _lost(f"{self.path} cannot be read: {error.strerror or error}") from error
        if found is None:
            raise _lost(f"the worker has not proposed the payload {self.sha256[:16]}")
        if len(found) > most or sha256_of(found) != self.sha256:
            raise _lost(f"the bytes of the payload {self.sha256[:16]} have changed")
        return found

    def inlined(self, most: int) -> StoredPayload:
        """The same payload for another machine, which cannot open the file. Raises as :meth:`read`."""
        return self if self.path is None else replace(self, path=None, data=self.read(most))


Payload: TypeAlias = bytes | StoredPayload
"""A payload at hand, or where it is."""


def name_of(payload: Payload) -> str:
    """The hash (hex) of a payload, which is not read for it."""
    return payload.sha256 if isinstance(payload, StoredPayload) else sha256_of(payload)


def _first_bytes(path: Path, count: int) -> bytes:
    with path.open("rb") as file:
        return file.read(count)


def _lost(why: str) -> HetnodeError:
    return HetnodeError(
        ErrorCode.PAYLOAD_UNAVAILABLE,
        f"A payload that was here is gone: {why}.",
        "The node fetches it again or continues from a checkpoint; check the disk of its work folder.",
    )
