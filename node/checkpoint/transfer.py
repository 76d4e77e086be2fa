"""Checkpoints between peers: serves the parts on this peer's disk, and fetches a part from several donors."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

from node.checkpoint import parts
from node.checkpoint.download import CheckpointDownload, Donors, Download, WrongBytes, list_reasons
from node.checkpoint.durable import flush
from node.checkpoint.initial import InitialAnchors
from protocol.errors import ErrorCode, HetnodeError
from protocol.math.digest import CHUNK_BYTES, HASH_BYTES, chunk_count, chunk_range, digest_of
from protocol.server.backoff import pause_after
from protocol.trust.private_file import FULL_DISK
from protocol.types import Part

log = logging.getLogger(__name__)

PIECE_BYTES = 256 * 1024  # the fastest size of a chunk on a stream
_PER_DONOR = 2  # requests under way, so that a donor never waits for the next one
_AT_ONCE = 16  # bounds the chunks in memory
_TELLING_SECONDS = 30.0  # between two lines in the log
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 3.0  # seconds; doubled after each failure of a donor
_INITIAL = "initial"  # folder below that of the checkpoints
_HELD_SECONDS = 600.0  # after the last request of a part
_HASHES_KEPT = 64  # parts whose hashes a server remembers; computing them reads the whole file

Ask = Callable[[str, int, int], Awaitable[bytes]]
"""(donor, index in a StateRequest, number of bytes) -> exactly that number of bytes. May raise anything."""


class CheckpointServer:
    """Serves the parts of the checkpoints below `folder`, and the anchors before round 1.

    A node writes no checkpoint of round 0. Its server makes the file when a peer asks for the first time.
    A download may last longer than a node keeps a checkpoint, so what was asked for stays open. Belongs to
    one event loop.
    """

    def __init__(self, folder: Path, initial: InitialAnchors | None = None) -> None:
        self._folder, self._initial = folder, initial
        self._chunk_hashes = lru_cache(_HASHES_KEPT)(parts.chunk_hashes)
        self._held: dict[tuple[int, Part, int], _HeldPart] = {}
        self._hashing = asyncio.Lock()  # one part at a time, because hashing needs a whole core

    async def find(self, stage: int, part: Part, round_number: int) -> parts.StoredPart | None:
        """The part after `round_number`; None where this node has none. Raises as InitialAnchors.write."""
        if round_number or self._initial is None:
            found = await asyncio.to_thread(parts.find, self._folder, stage, part, round_number)
            return self._hold((stage, part, round_number), found)
        if stage not in self._initial.stages or part not in (Part.STAGE, Part.EMBEDDING):
            return None
        beside = self._folder / _INITIAL  # no folder of a round lies there, so no start loads from it
        async with self._hashing:
            found = await asyncio.to_thread(parts.find, beside, stage, part, 0)
            if found is None:
                await asyncio.to_thread(self._initial.write, beside, stage)
                found = await asyncio.to_thread(parts.find, beside, stage, part, 0)
        return found

    def _hold(self, key: tuple[int, Part, int], found: parts.StoredPart | None) -> parts.StoredPart | None:
        """The part that is `found` now, or else what was found at an earlier request."""
        held = self._held.pop(key, None)
        if held is not None:
            held.ends.cancel()
        if found is not None and (held is None or held.part.version != found.version):
            with suppress(OSError):
                held = _HeldPart(found, found.path.open("rb"))
        if held is None:
            return found
        self._held[key] = held
        held.ends = asyncio.get_running_loop().call_later(_HELD_SECONDS, self._held.pop, key, None)
        return found or held.again

    async def pieces(self, part: parts.StoredPart, index: int) -> AsyncIterator[bytes]:
        """The answer to a StateRequest, read from the disk piece by piece.

        Raises IndexError if the part has no such chunk, OSError if the file was removed or changed.
        """
        if index == 0:  # asks for the hashes of all chunks; chunk i has index i + 1
            async with self._hashing:
                hashes = await asyncio.to_thread(self._chunk_hashes, part)
            for start in range(0, len(hashes), PIECE_BYTES):
                yield hashes[start : start + PIECE_BYTES]
            return
        chunk = parts.pieces(part, chunk_range(part.nbytes, index - 1), PIECE_BYTES)
        while piece := await asyncio.to_thread(next, chunk, b""):
            yield piece


class _HeldPart:
    """A part whose file is open. On Linux, an open file can be opened again after it was removed."""

    ends: asyncio.TimerHandle

    def __init__(self, part: parts.StoredPart, file: BinaryIO) -> None:
        self.part, self._file = part, file

    @property
    def again(self) -> parts.StoredPart:
        return replace(self.part, path=Path(f"/proc/self/fd/{self._file.fileno()}"))


async def fetch_checkpoint(
    download: CheckpointDownload, donors: Iterable[str], seconds: float, ask: Ask
) -> None:
    """See :meth:`Transport.fetch_checkpoint`. `donors` are in order of preference."""
    # The size is that of the spec: a donor cannot make this node write more.
    record, nbytes, into = download.record, download.nbytes, download.into
    known = Donors(donors)
    what = f"stage {record.stage}" if record.part is Part.STAGE else f"the {record.part}"
    name = f"{what} after round {record.round_number}"
    title = name[0].upper() + name[1:]
    chunks = chunk_count(nbytes)
    missing = set(range(chunks))
    try:
        async with asyncio.timeout(seconds):
            hashes = await _chunk_list(download, known, name, ask)
            missing &= await asyncio.to_thread(_missing_chunks, into, nbytes, hashes)
            if len(missing) < chunks:
                log.info("%s: %d of %d chunks are here already", name, chunks - len(missing), chunks)
            progress = _Progress(name, missing)

            async def ask_for_chunk(donor: str, chunk: int) -> bytes:
                return await ask(donor, chunk + 1, len(chunk_range(nbytes, chunk)))

            async def keep(chunk: int, data: bytes) -> None:
                # In a thread: hashing would block the event loop.
                if await asyncio.to_thread(lambda: hashlib.sha256(data).digest()) != hashes[chunk]:
                    raise WrongBytes(f"chunk {chunk} has another hash than the checkpoint")
                await asyncio.to_thread(write_chunk, into, chunk_range(nbytes, chunk).start, data)
                progress.tell()

            await _Transfer(Download(missing, known), name, ask_for_chunk, keep).run()
            await asyncio.to_thread(flush, into)  # on return the part must survive a crash
            progress.tell(is_over=True)
    except (TimeoutError, _NoDonorLeft):
        raise HetnodeError(
            ErrorCode.STATE_UNAVAILABLE,
            f"{title} did not arrive whole from its {len(known)} donors; "
            f"{chunks - len(missing)} of {chunks} chunks are here: {list_reasons(known.reasons)}.",
            "Try again: the chunks that are here are kept, and other donors may come.",
        ) from None
    except OSError as error:
        full = error.errno in FULL_DISK
        raise HetnodeError(
            ErrorCode.DISK_FULL,
            f"{title} cannot be written to {into}: {error.strerror or error}.",
            f"{'Make room on that disk' if full else 'Make it writable'}, then start the node again.",
        ) from None


class _Progress:
    """Tells the log from time to time how far a download of the chunks `missing` is, which leave that set."""

    def __init__(self, name: str, missing: Collection[int]) -> None:
        self._name, self._missing, self._wanted = name, missing, len(missing)
        self._clock = asyncio.get_running_loop().time
        self._began = self._told = self._clock()

    def tell(self, is_over: bool = False) -> None:
        now = self._clock()
        if not is_over and now < self._told + _TELLING_SECONDS:
            return
        self._told, seconds, rest = now, max(now - self._began, 1e-3), len(self._missing)
        here = (self._wanted - rest) * CHUNK_BYTES
        log.info(
            "%s: %.0f of %.0f MB in %.0f s, %.1f Mb/s%s",
            *(self._name, here / 1e6, self._wanted * CHUNK_BYTES / 1e6, seconds, 8e-6 * here / seconds),
            "" if is_over else f", about {rest * CHUNK_BYTES * seconds / max(here, 1):.0f} s more",
        )


class _NoDonorLeft(Exception):
    """No donor may be asked any more."""


async def _chunk_list(download: CheckpointDownload, donors: Donors, name: str, ask: Ask) -> list[bytes]:
    """The hash of every chunk, from the first donor whose list gives the digest of the record."""
    size = HASH_BYTES * chunk_count(download.nbytes)
    found: list[bytes] = []

    async def keep(_: int, data: bytes) -> None:
        hashes = [data[start : start + HASH_BYTES] for start in range(0, size, HASH_BYTES)]
        if await asyncio.to_thread(digest_of, download.header, hashes) != download.record.digest:
            raise WrongBytes("its list of chunks is not that of the checkpoint")
        found[:] = hashes

    await _Transfer(Download({0}, donors), name, lambda donor, _: ask(donor, 0, size), keep).run()
    return found


class _Transfer:
    """Carries out a :class:`Download` with some tasks for each donor.

    Args:
        ask: (donor, piece) -> the bytes of the piece. May raise anything.
        keep: verifies a piece, then stores it; may be called twice for one piece. Raises WrongBytes; OSError,
            which ends the transfer.
    """

    def __init__(
        self,
        download: Download,
        name: str,
        ask: Callable[[str, int], Awaitable[bytes]],
        keep: Callable[[int, bytes], Awaitable[None]],
    ) -> None:
        self._download, self._name, self._ask, self._keep = download, name, ask, keep
        self._changed = asyncio.Condition()
        self._at_once = asyncio.Semaphore(_AT_ONCE)
        self._arriving = 0  # pieces that are being verified or written
        self._is_over = False

    async def run(self) -> None:
        """Return when nothing is missing. Raises _NoDonorLeft; OSError from `keep`."""
        donors = [donor for donor in self._download.donors.usable for _ in range(_PER_DONOR)]
        ended = asyncio.create_task(self._wait_ended())
        waiting = tasks = {ended, *(asyncio.create_task(self._work(donor)) for donor in donors)}
        try:
            while not ended.done():
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()  # an error of `keep` ends the transfer
        finally:
            self._is_over = True  # a library may swallow the cancellation of a task
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if not self._download.is_complete:
            raise _NoDonorLeft

    async def _wait_ended(self) -> None:
        download = self._download
        async with self._changed:
            # The last donor may be excluded while a piece from it is still being written.
            await self._changed.wait_for(
                lambda: download.is_complete or (download.is_hopeless and not self._arriving)
            )

    async def _work(self, donor: str) -> None:
        download = self._download
        while not self._is_over:
            async with self._changed:
                while (piece := download.next_for(donor)) is None:
                    if self._is_over or download.donors[donor].is_out:
                        return
                    await self._changed.wait()
            async with self._at_once:
                await self._get(donor, piece)
            async with self._changed:
                self._changed.notify_all()  # a failed piece is free again for other donors
            if failures := download.donors[donor].failures:
                await asyncio.sleep(pause_after(failures, FIRST_PAUSE, LONGEST_PAUSE))

    async def _get(self, donor: str, piece: int) -> None:
        try:
            data = await self._ask(donor, piece)
        except WrongBytes as error:
            self._refuse(donor, piece, error)
            return
        except Exception as error:  # a transport's library raises anything here
            log.debug("%s: %s did not send chunk %d: %r", self._name, donor, piece, error)
            self._download.failed(donor, piece, str(error) or type(error).__name__)
            return
        self._arriving += 1
        try:
            await self._keep(piece, data)
            self._download.arrived(donor, piece)
        except WrongBytes as error:
            self._refuse(donor, piece, error)
        finally:
            self._arriving -= 1

    def _refuse(self, donor: str, piece: int, error: WrongBytes) -> None:
        log.warning("%s: %s sent wrong bytes and is not asked again: %s", self._name, donor, error)
        self._download.failed(donor, piece, str(error), has_lied=True)


def _missing_chunks(into: Path, nbytes: int, hashes: list[bytes]) -> set[int]:
    """The chunks that the file lacks. Creates the file if necessary, and gives it the right size."""
    into.parent.mkdir(parents=True, exist_ok=True)
    lacking = set()
    with os.fdopen(os.open(into, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b") as file:
        had = os.fstat(file.fileno()).st_size
        file.truncate(nbytes)  # the rest is filled with zeros, so `had` tells what was written
        for index, wanted in enumerate(hashes):
            chunk = chunk_range(nbytes, index)
            if chunk.start >= had or hashlib.sha256(file.read(len(chunk))).digest() != wanted:
                lacking.add(index)
    return lacking


def write_chunk(into: Path, start: int, data: bytes) -> None:
    with into.open("r+b", buffering=0) as file:
        file.seek(start)
        rest = memoryview(data)
        while rest:
            rest = rest[file.write(rest) :]  # an unbuffered write may be partial
