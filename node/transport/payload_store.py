"""The payloads of one stage that a peer holds and serves, on its disk, by round and hash."""

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

from node.checkpoint.layout import round_folder
from protocol.errors import ErrorCode, HetnodeError

log = logging.getLogger(__name__)

_ROUND = re.compile(r"round-(\d{6,})")
_HASH = re.compile(r"[0-9a-f]{64}")
_PARTIAL = ".partial"
_MEMORY_ROUNDS = 2


class PayloadStore:
    """Payload bytes of the newest rounds, as ``round-NNNNNN/<sha256>`` below a folder of their own.

    What :meth:`put` has written survives any crash, and a new store on the same folder serves it. Where the
    disk refuses, payloads of the newest rounds are held in memory, and the log says so once. Its size is
    bounded by its user, who puts in only payloads whose announced length was checked.

    May be used from several threads; all methods but :meth:`has` block on the disk.

    Args:
        folder: made when it is needed. Other things in it are left alone.
        keep_rounds: rounds older than this many before the newest are dropped.
    """

    def __init__(self, folder: Path, keep_rounds: int) -> None:
        self._folder, self._keep = folder, keep_rounds
        self._lock = threading.Lock()  # over the fields below, never held while the disk works
        self._written: dict[int, set[str]] = {}
        self._in_memory: dict[int, dict[str, bytes]] = {}
        self._disk_refuses = False
        self._sweep()
        self._drop_old(max(self._written, default=0))

    def put(self, round_number: int, sha256: str, payload: bytes) -> None:
        """Hold `payload`, whose hash is `sha256`, at least until the next one is put. Never fails."""
        if self.has(round_number, sha256):
            return
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
        """Whether :meth:`get` will find it, unless the disk has lost or changed it."""
        with self._lock:
            return sha256 in self._written.get(round_number, ()) or sha256 in self._in_memory.get(
                round_number, ()
            )

    def get(self, round_number: int, sha256: str) -> bytes | None:
        """The payload, if it is held and its bytes are still right."""
        found = self.pieces(round_number, sha256, 1 << 20)
        try:
            return None if found is None else b"".join(found)
        except OSError:
            return None

    def pieces(self, round_number: int, sha256: str, size: int) -> Iterator[bytes] | None:
        """As :meth:`get`, but at most `size` bytes at a time. OSError where the disk fails underway."""
        with self._lock:
            payload = self._in_memory.get(round_number, {}).get(sha256)
            is_written = sha256 in self._written.get(round_number, ())
        if payload is not None:
            return (payload[start : start + size] for start in range(0, len(payload), size))
        if not is_written:
            return None
        path = self._path(round_number, sha256)
        try:
            with path.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() == sha256:
                    return _read(path, size)
            log.warning("the payload %s is not what was written; it is dropped", path)
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
            old = [round_number for round_number in self._written if round_number < before_round]
            for round_number in old:
                del self._written[round_number]
            self._in_memory = {
                round_number: held
                for round_number, held in self._in_memory.items()
                if round_number >= before_round
            }
        for round_number in old:
            shutil.rmtree(self._round_folder(round_number), ignore_errors=True)

    def _write(self, round_number: int, sha256: str, payload: bytes) -> None:
        """On return the payload is on the disk under its name, whatever happens next."""
        path = self._path(round_number, sha256)
        # Two threads may write the same payload.
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
        for folder in (path.parent, self._folder) if is_new else (path.parent,):
            _flush(folder)

    def _drop_old(self, current: int) -> None:
        """Drop what is older than is to be kept, but nothing from round `current` on."""
        with self._lock:
            newest = max((*self._written, *self._in_memory), default=0)
            first_in_memory = min(current, newest - _MEMORY_ROUNDS + 1)
            for round_number in [each for each in self._in_memory if each < first_in_memory]:
                del self._in_memory[round_number]
        self.forget(min(current, newest - self._keep + 1))

    def _sweep(self) -> None:
        """Find what an earlier process has written, and remove what it was writing when it ended."""
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
            log.warning(
                "%s",
                HetnodeError(
                    ErrorCode.DISK_FULL,
                    f"A payload cannot be kept in {self._folder}: {error.strerror or error}. Rounds go on "
                    "from memory, but what is held there is lost when this node ends.",
                    "Make room on that disk.",
                ),
            )

    def _round_folder(self, round_number: int) -> Path:
        return self._folder / round_folder(round_number)

    def _path(self, round_number: int, sha256: str) -> Path:
        return self._round_folder(round_number) / sha256


def _read(path: Path, size: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(size):
            yield piece


def _flush(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
