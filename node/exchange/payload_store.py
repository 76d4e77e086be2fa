"""Keeps the payloads of one stage on the disk, by round and hash, so that this peer can serve them."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from node.checkpoint.durable import flush
from node.checkpoint.layout import round_folder
from node.ipc.stored_payload import StoredPayload
from protocol.errors import ErrorCode, HetnodeError

log = logging.getLogger(__name__)

_ROUND = re.compile(r"round-(\d{6,})")
_HASH = re.compile(r"[0-9a-f]{64}")
_PARTIAL = ".partial"
_MEMORY_ROUNDS = 2  # newest rounds that memory holds if the disk refuses; older ones are applied already


class PayloadStore:
    """Payload bytes of the newest `keep_rounds` rounds, as ``round-NNNNNN/<sha256>`` in one folder.

    A payload that :meth:`put` has written survives any crash, and a new store on the same folder serves it.
    If the disk refuses, memory holds the payloads of the newest rounds, and the log says so once. The caller
    bounds the size: it puts only payloads whose announced length it has checked.

    The folder is created when it is needed; other files in it are not touched. Several threads may use the
    store; all methods except :meth:`has` block on the disk.
    """

    def __init__(self, folder: Path, keep_rounds: int) -> None:
        self._folder, self._keep = folder.absolute(), keep_rounds  # workers open its files
        self._lock = threading.Lock()  # protects the fields below; not held during disk operations
        self._written: dict[int, set[str]] = {}
        self._in_memory: dict[int, dict[str, bytes]] = {}
        self._disk_refuses = False
        self._sweep()
        self._drop_old(max(self._written, default=0))

    def put(self, round_number: int, sha256: str, payload: bytes) -> StoredPayload:
        """Keep `payload`, whose hash is `sha256`, at least until a later round comes. Never fails."""
        if not self.has(round_number, sha256):
            self._keep_bytes(round_number, sha256, payload)
        with self._lock:
            if sha256 in self._written.get(round_number, ()):
                return StoredPayload(sha256, self._path(round_number, sha256))
        return StoredPayload(sha256, data=payload)

    def _keep_bytes(self, round_number: int, sha256: str, payload: bytes) -> None:
        try:
            self._write(round_number, sha256, payload)
        except OSError as error:
            self._warn(error)
            with self._lock:
                self._in_memory.setdefault(round_number, {})[sha256] = payload
        else:
            with self._lock:
                self._disk_refuses = False
                self._written.setdefault(round_number, set()).add(sha256)
        self._drop_old(round_number)

    def has(self, round_number: int, sha256: str) -> bool:
        """Whether :meth:`find` will find the payload, unless the disk has lost or changed it."""
        with self._lock:
            return any(sha256 in held.get(round_number, ()) for held in (self._written, self._in_memory))

    def get(self, round_number: int, sha256: str) -> bytes | None:
        """The bytes of a payload, if it is kept and they are still right."""
        found = self.pieces(round_number, sha256, 1 << 20)
        try:
            return None if found is None else b"".join(found)
        except OSError:
            return None

    def pieces(self, round_number: int, sha256: str, size: int) -> Iterator[bytes] | None:
        """As :meth:`get`, in pieces of `size` bytes at most. Iterating raises OSError if the disk fails."""
        found = self.find(round_number, sha256)
        if found is None:
            return None
        if found.path is not None:
            return _read(found.path, size)
        data = found.data or b""
        return (data[start : start + size] for start in range(0, len(data), size))

    def find(self, round_number: int, sha256: str) -> StoredPayload | None:
        """The payload, if it is kept and its bytes are still right."""
        with self._lock:
            payload = self._in_memory.get(round_number, {}).get(sha256)
            is_written = sha256 in self._written.get(round_number, ())
        if payload is not None:
            return StoredPayload(sha256, data=payload)
        if not is_written:
            return None
        path = self._path(round_number, sha256)
        try:
            # The whole file is verified first: a peer that sent wrong bytes would be blamed for them.
            with path.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() == sha256:
                    return StoredPayload(sha256, path)
            log.warning("the payload %s has changed on the disk; it is dropped", path)
        except OSError as error:
            log.warning("the payload %s cannot be read: %s", path, error)
        with self._lock:
            self._written.get(round_number, set()).discard(sha256)
        with suppress(OSError):
            path.unlink()
        return None

    def forget(self, before_round: int) -> None:
        """Drop the rounds before `before_round`."""
        with self._lock:
            self._drop_from_memory(before_round)
            old = [each for each in self._written if each < before_round]
            for round_number in old:
                del self._written[round_number]
        for round_number in old:
            shutil.rmtree(self._round_folder(round_number), ignore_errors=True)

    def _write(self, round_number: int, sha256: str, payload: bytes) -> None:
        """Write the payload so that it survives a crash after the return."""
        path = self._path(round_number, sha256)
        # The name contains the thread, because two threads may write the same payload.
        partial = path.with_name(f"{sha256}.{threading.get_ident()}{_PARTIAL}")
        is_new = not path.parent.exists()
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with partial.open("wb") as file:
                file.write(payload)
                file.flush()
                os.fsync(file.fileno())
            partial.rename(path)
        except OSError:
            with suppress(OSError):
                partial.unlink()
            raise
        # The folder's entry must reach the disk too; a new round folder is an entry of its parent.
        for folder in (path.parent, self._folder) if is_new else (path.parent,):
            flush(folder)

    def _drop_old(self, current: int) -> None:
        """Drop old rounds, but nothing from round `current` on: its payloads are still needed."""
        with self._lock:
            newest = max((*self._written, *self._in_memory), default=0)
            self._drop_from_memory(min(current, newest - _MEMORY_ROUNDS + 1))
        self.forget(min(current, newest - self._keep + 1))

    def _drop_from_memory(self, before_round: int) -> None:
        for round_number in [each for each in self._in_memory if each < before_round]:
            del self._in_memory[round_number]

    def _sweep(self) -> None:
        """Find the payloads of an earlier process, and remove the ones that it had not finished."""
        for folder in self._folder.iterdir() if self._folder.is_dir() else ():
            match = _ROUND.fullmatch(folder.name)
            if match is None or not folder.is_dir():
                continue
            for path in folder.iterdir():
                if path.name.endswith(_PARTIAL):
                    with suppress(OSError):
                        path.unlink()
                elif _HASH.fullmatch(path.name):
                    self._written.setdefault(int(match[1]), set()).add(path.name)

    def _warn(self, error: OSError) -> None:
        with self._lock:
            is_first, self._disk_refuses = not self._disk_refuses, True
        if is_first:
            warning = HetnodeError(
                ErrorCode.DISK_FULL,
                f"A payload cannot be kept in {self._folder}: {error.strerror or error}. Rounds continue "
                "with payloads in memory, which are lost when this node ends.",
                "Make room on that disk.",
            )
            log.warning("%s", warning)

    def _round_folder(self, round_number: int) -> Path:
        return self._folder / round_folder(round_number)

    def _path(self, round_number: int, sha256: str) -> Path:
        return self._round_folder(round_number) / sha256


def _read(path: Path, size: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(size):
            yield piece
