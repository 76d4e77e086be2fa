"""The signed head of an event log."""

from __future__ import annotations

import struct
from pathlib import Path

from protocol.trust.envelope import Signer, is_signed_by, log_head_message
from protocol.trust.private_file import write_whole
from protocol.types import PeerId


class LogHead:
    """The file with the number of rows of a log and its newest row hash, signed by the coordinator.

    It may lag behind the log by the newest rows, and is never ahead of it.

    Args:
        coordinator: peer id of the key of `sign`.
    """

    def __init__(self, path: Path, coordinator: PeerId, sign: Signer) -> None:
        self.path = path
        self._coordinator, self._sign = coordinator, sign

    def create(self, rows: int, row_hash: bytes) -> None:
        """Write the file as a whole; it is durable when this returns. Raises OSError."""
        write_whole(self.path, self._line(rows, row_hash))

    def write(self, rows: int, row_hash: bytes) -> None:
        """Replace the content in place. Raises OSError."""
        # All lines have one length below a sector's, so a crash leaves the old or the new one. Not flushed:
        # a second flush for each append would only protect the rows of the last seconds.
        with self.path.open("r+b") as file:
            file.write(self._line(rows, row_hash))

    def read(self) -> tuple[int, bytes]:
        """The number of rows and the newest row hash. ValueError unless the coordinator signed them."""
        try:
            rows, row_hash, signature = self.path.read_text("ascii").split()
            head = int(rows), bytes.fromhex(row_hash)
            is_signed = is_signed_by(self._coordinator, log_head_message(*head), bytes.fromhex(signature))
        except FileNotFoundError:
            raise ValueError(f"{self.path.name}, the file with its newest hash, is missing") from None
        except (OSError, ValueError, struct.error) as error:
            raise ValueError(f"{self.path.name} is unreadable ({error})") from None
        if not is_signed:
            raise ValueError(f"{self.path.name} is not signed with the key of this coordinator")
        return head

    def _line(self, rows: int, row_hash: bytes) -> bytes:
        return f"{rows:020d} {row_hash.hex()} {self._sign(log_head_message(rows, row_hash)).hex()}\n".encode()
