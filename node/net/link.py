"""The link between two neighbouring members: a live stream of frames over gRPC, the same at both ends.

One end dials (:mod:`node.net.link_dialer`), the other accepts (:mod:`node.net.link_server`). Both begin with
the greeting in :mod:`node.net.link_handshake`. gRPC's HTTP/2 windows and a bounded inbox give flow control:
the neighbour of a member that takes no frames has to wait, and the member's memory stays bounded.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import grpc
from google.protobuf.message import DecodeError

from node.net.live_estimates import LEAST_FRAME_BYTES
from node.net.streams import STREAM_ERRORS, is_cancelled
from protocol.errors import ErrorCode, HetnodeError
from protocol.server.line import UNLIMITED, Line
from protocol.types import Frame, FrameId, FrameKind, PeerId
from protocol.wire.framing import FrameAssembler, chunks, frame_header_from_pb, frame_header_to_pb
from protocol.wire.link_message import LinkMessage
from protocol.wire.rpc_errors import error_from_rpc

log = logging.getLogger(__name__)

Received = Callable[[PeerId, int, float], None]
"""Called with the sender of a received frame, the bytes that were timed, and their seconds of arrival."""

clock = time.perf_counter  # the event loop's clock is too coarse for frames

# Least time between two headers sent ahead of their payload, so that the receiver can time the payload. On a
# fast link, a separate message for every header would cost as much as a large part of the payload.
_TIMED_EVERY_SECONDS = 0.1

_FAREWELL = FrameId(0, 2**32 - 1, 0, 0, FrameKind.STEP)  # no run can reach this round


@dataclass(frozen=True)
class LinkMember:
    """One end of a link: which member it is, and in which run and plan (`epoch`).

    `round_number` is the first round of the link: members in different rounds must not be connected yet.
    """

    run: str
    spec_hash: str
    peer: PeerId
    replica: int
    position: int
    epoch: int = 1
    round_number: int = 1

    @property
    def name(self) -> str:
        return f"Member {self.position} of replica {self.replica} ({self.peer})"


@dataclass(frozen=True)
class LinkLimits:
    """Bounds of this node's memory for a neighbour: bytes of one frame, and frames that wait to be taken."""

    frame_bytes: int
    waiting_frames: int


class FrameRefused(HetnodeError):
    """A frame of the neighbour `sender` that cannot be used."""

    def __init__(self, sender: PeerId, error: HetnodeError) -> None:
        super().__init__(error.code, error.cause, error.remedy)
        self.sender = sender


class LiveLink:
    """A live stream of frames to one neighbour.

    After its end, `send` and `take` raise NEIGHBOUR_LOST, or the error that ended it (FRAME_CORRUPT, ...).

    `bytes_sent` counts the headers and payloads that :meth:`send` has sent, without gRPC's own bytes.
    `is_closed_here`: this end closed the link without an error.
    """

    def __init__(
        self,
        neighbour: LinkMember,
        read: Callable[[], Awaitable[Any]],
        write: Callable[[Any], Awaitable[None]],
        limits: LinkLimits,
        received: Received | None = None,
        line: Line = UNLIMITED,
    ) -> None:
        self.neighbour = neighbour
        self.bytes_sent = 0
        self._read, self._write = read, write
        self._assembler = FrameAssembler(limits.frame_bytes)
        self._send_lock = asyncio.Lock()
        self._inbox: dict[FrameId, Frame] = {}
        self._room = limits.waiting_frames
        self._changed = asyncio.Event()  # set and then replaced when the inbox or `_failure` changes
        self._failure: HetnodeError | None = None  # set as soon as the stream has ended
        self.is_closed_here = False
        self._received, self._line = received, line
        self._timed_at = -math.inf
        self._frame_began = 0.0
        self._came_with_header = 0  # payload bytes in the message of the header; they cannot be timed
        # A frame that arrives while the inbox is full waits in buffers: its time does not measure the link.
        self._was_held_up = False
        self._reader = asyncio.create_task(self._receive_all(), name=f"link-{neighbour.position}")

    async def send(self, frame: Frame, deadline: float) -> None:
        """Send one frame within `deadline` seconds; return when gRPC has taken all of it.

        A frame that is sent only in part, for any reason, ends the link.
        """
        header = frame_header_to_pb(frame.id, frame.tensors)
        is_under_way = False
        if self._failure is not None:
            raise self._failure
        try:
            async with asyncio.timeout(deadline), self._send_lock:
                is_under_way = True
                pieces = self._paced(chunks(frame))
                if self._must_be_timed(frame):
                    await self._write(LinkMessage(header=header))
                else:
                    await self._write(LinkMessage(header=header, chunk=await anext(pieces, None)))
                async for chunk in pieces:
                    await self._write(LinkMessage(chunk=chunk))
                is_under_way = False
        except TimeoutError:
            raise self._lost(f"it took no frame for {deadline:.0f} s") from None
        except STREAM_ERRORS as error:
            raise self._failure or self._lost(error) from None
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            raise self._failure or self._lost("the stream has ended") from None
        finally:
            if is_under_way:  # the receiver would read the next frame as the rest of this one
                self._fail(self._lost("a frame to it was not finished"))
        self.bytes_sent += header.ByteSize() + len(frame.payload)

    async def _paced(self, chunks: Iterator[memoryview]) -> AsyncIterator[memoryview]:
        for chunk in chunks:
            await self._line.up.take(len(chunk))
            yield chunk

    async def take(self, frame_id: FrameId, deadline: float) -> Frame:
        """Wait up to `deadline` seconds for the frame `frame_id`. Each frame is returned once."""
        try:
            async with asyncio.timeout(deadline):
                await self._until(lambda: frame_id in self._inbox or self._failure is not None)
        except TimeoutError:
            raise HetnodeError(
                ErrorCode.NEIGHBOUR_LOST,
                f"{self.neighbour.name} sent no {frame_id.kind.value} frame within {deadline:.0f} s, for "
                f"microbatch {frame_id.microbatch} of inner step {frame_id.step} in round "
                f"{frame_id.round_number}.",
                "Check that neighbour's log and connection; timing.link in the run file sets the bound.",
            ) from None
        if frame_id not in self._inbox and self._failure is not None:
            raise self._failure
        self._note_change()
        return self._inbox.pop(frame_id)

    async def part(self, deadline: float) -> None:
        """Send a farewell and wait up to `deadline` seconds for the neighbour's. Never raises."""
        # Without it, one end could close during the last write of the other end, and that write would fail.
        with suppress(HetnodeError):
            await self.send(Frame(_FAREWELL, (), b""), deadline)
        with suppress(HetnodeError):
            await self.take(_FAREWELL, deadline)

    def drop_before(self, round_number: int) -> None:
        """Drop the frames of rounds before `round_number`: they must not count in a later round."""
        for frame_id in [each for each in self._inbox if each.round_number < round_number]:
            del self._inbox[frame_id]
        self._note_change()

    async def wait_closed(self) -> HetnodeError:
        """Wait until the link ends; return the reason."""
        await self._until(lambda: self._failure is not None)
        assert self._failure is not None
        return self._failure

    async def close(self, reason: HetnodeError | None = None) -> None:
        """End the link, for `reason` if there is one."""
        self._reader.cancel()
        try:
            await asyncio.wait({self._reader})
        finally:
            self.is_closed_here = reason is None and self._failure is None
            self._fail(reason or self._lost("the link was closed here"))

    async def _receive_all(self) -> None:
        try:
            while (message := await read_message(self._read())) is not None:
                frame = self._accept(message)
                # Not reading makes gRPC's window close, and the sender waits.
                await self._line.down.take(len(message.chunk or b""))
                if frame is not None:
                    self._report_received(len(frame.payload))
                    await self._store(frame)
            self._fail(self._lost("it closed the stream"))
        except HetnodeError as error:
            log.error("link to %s: %s", self.neighbour.name, error)
            self._fail(FrameRefused(self.neighbour.peer, error))
        except STREAM_ERRORS as error:
            self._fail(error_from_rpc(error) or self._lost(error))
        except Exception as error:
            # A caller that waits for a frame must get an error, even if a bug in this program is the cause.
            log.exception("link to %s", self.neighbour.name)
            self._fail(self._lost(f"reading from it failed ({error!r})"))

    def _must_be_timed(self, frame: Frame) -> bool:
        """Whether to send the header of `frame` separately, so that the receiver can time the payload."""
        now = clock()
        if len(frame.payload) < LEAST_FRAME_BYTES or now < self._timed_at + _TIMED_EVERY_SECONDS:
            return False
        self._timed_at = now
        return True

    def _accept(self, message: LinkMessage) -> Frame | None:
        if message.hello is not None or (message.header is None and message.chunk is None):
            raise HetnodeError(
                ErrorCode.FRAME_CORRUPT,
                f"{self.neighbour.name} sent a message that is neither a frame header nor a chunk.",
                "The stream is closed; update the older program of the two ends.",
            )
        frame = None
        if message.header is not None:
            self._frame_began, self._came_with_header = clock(), len(message.chunk or b"")
            frame = self._assembler.header(*frame_header_from_pb(message.header))
        if message.chunk is not None:
            frame = self._assembler.chunk(message.chunk)
        return frame

    def _report_received(self, nbytes: int) -> None:
        timed = nbytes - self._came_with_header
        if timed and self._received is not None and not self._was_held_up:
            self._received(self.neighbour.peer, timed, clock() - self._frame_began)

    async def _store(self, frame: Frame) -> None:
        self._was_held_up = len(self._inbox) >= self._room
        # Not reading makes gRPC's window close, and the sender waits.
        await self._until(lambda: len(self._inbox) < self._room)
        self._inbox[frame.id] = frame  # a repeated frame replaces the first, so it cannot count twice
        self._note_change()

    async def _until(self, ready: Callable[[], bool]) -> None:
        while not ready():
            await self._changed.wait()

    def _note_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _fail(self, error: HetnodeError) -> None:
        self._failure = self._failure or error  # the first error is the cause; later ones follow from it
        self._note_change()

    def _lost(self, why: object) -> HetnodeError:
        if isinstance(why, grpc.aio.AioRpcError):
            why = f"{why.code().name}: {why.details()}"
        return HetnodeError(
            ErrorCode.NEIGHBOUR_LOST,
            f"{self.neighbour.name} is gone: {why}.",
            "See its log for the reason. This replica cannot continue without it; the other replicas can.",
        )


async def read_message(read: Awaitable[Any]) -> LinkMessage | None:
    """The message that `read` gives; None at the end of the stream. Raises HetnodeError FRAME_CORRUPT."""
    try:
        message = await read
    except DecodeError:
        message = None
    # At the dialling end, gRPC logs the error of the decoder and returns None.
    if message is None:
        raise refusal(ErrorCode.FRAME_CORRUPT, "its bytes are no message of a link")
    return None if message is grpc.aio.EOF else cast(LinkMessage, message)


def refusal(code: ErrorCode, why: str) -> HetnodeError:
    return HetnodeError(
        code, f"This link is refused: {why}.", "Join through the coordinator; it names neighbours."
    )
