"""The link between two neighbouring members: one gRPC bidirectional stream of frames, under mutual TLS.

Both ends show certificates of the run, and each believes only the one peer that the plan names for the other
end: the dialler while it connects, the accepting end before it reads anything but the greeting.

Whichever end can dial opens the stream; afterwards both ends are alike (:class:`Link`). gRPC's HTTP/2 windows
and a bounded inbox give flow control: a member that does not consume makes its neighbour wait, not grow.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Set
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from node import hooks
from node.net.live_estimates import LEAST_FRAME_BYTES
from node.net.probe import answer_probe
from node.security.channels import open_channel, server_credentials, tls_failure
from node.security.credentials import Credentials
from protocol.errors import ErrorCode, HetnodeError
from protocol.pb import hetnode_pb2 as pb
from protocol.trust.tls import identity_of, peer_of, peer_uri, tls_name
from protocol.types import PROTOCOL_VERSION, Frame, FrameId, FrameKind, PeerId
from protocol.wire.convert.frames import frame_header_from_pb, frame_header_to_pb
from protocol.wire.framing import CHUNK_BYTES, FrameAssembler, chunks
from protocol.wire.link_message import LinkMessage
from protocol.wire.probing import ProbeDoor
from protocol.wire.rpc_errors import abort_with, error_from_rpc

log = logging.getLogger(__name__)

KEEPALIVE_SECONDS = 20.0
"""An idle link is probed this often: the dead are noticed, and routers do not forget the connection."""

Received = Callable[[PeerId, int, float], None]
"""Told of a frame: whose it was, its bytes, and in how many seconds they came."""

clock = time.perf_counter  # an event loop's own is too coarse for frames

_TIMED_EVERY_SECONDS = 0.1
"""At most so often a header travels ahead of its payload, so that the other end can time the frame. On a fast
link a message of its own for every header would cost as much as a large part of the payload."""

_SERVICE = "hetnode.v1.StageLink"
_MAX_STREAMS = 64
_PROBES_AT_ONCE = 2
_STREAMS_PER_PEER = 4  # one, and those of earlier attempts that have not noticed their end yet
# How gRPC says that a stream has ended: the caller's side, the servicer's side, and use after the end.
_STREAM_ERRORS = (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError)
_FAREWELL = FrameId(0, 2**32 - 1, 0, 0, 0, FrameKind.STEP)  # of no round that a run can reach
_HANDSHAKE_SECONDS = 20.0


@dataclass(frozen=True)
class LinkEndpoint:
    """Where one end of a link stands: what both ends must agree on, and which member this is.

    `epoch` is that of the plan, `round` the first round for which the link is opened: members that have not
    come equally far must not be connected yet.
    """

    run: str
    spec_hash: str
    peer: PeerId
    replica: int
    position: int
    epoch: int = 1
    round_number: int = 1


@dataclass(frozen=True)
class LinkLimits:
    """Bounds on what a neighbour may make this node keep: bytes of one frame, frames not yet taken."""

    frame_bytes: int
    waiting_frames: int


class Link:
    """A live stream of frames to one neighbour.

    `send` and `take` raise HetnodeError NEIGHBOUR_LOST once the stream has ended, or the error that ended it
    (FRAME_CORRUPT, FRAME_TOO_LARGE).
    """

    def __init__(
        self,
        neighbour: LinkEndpoint,
        read: Callable[[], Awaitable[Any]],
        write: Callable[[Any], Awaitable[None]],
        limits: LinkLimits,
        received: Received | None = None,
    ) -> None:
        self.neighbour = neighbour
        self.bytes_sent = 0
        self.bytes_received = 0
        self.frames_dropped = 0
        self._read, self._write = read, write
        self._assembler = FrameAssembler(limits.frame_bytes)
        self._send_lock = asyncio.Lock()
        self._inbox: dict[FrameId, Frame] = {}
        self._room = limits.waiting_frames
        self._awaited: defaultdict[FrameId, list[asyncio.Future[None]]] = defaultdict(list)
        self._has_room = asyncio.Event()
        self._ended = asyncio.Event()
        self._failure: HetnodeError | None = None  # set as soon as it has ended
        self._closed_here = False
        self._received = received
        self._timed_at = -math.inf
        self._frame_began = 0.0
        self._came_at_once = 0  # bytes of the frame that came with its header
        self._was_held_up = False  # what came meanwhile waited in buffers, and says nothing of the link
        self._reader = asyncio.create_task(self._receive_all(), name=f"link-{neighbour.position}")

    async def send(self, frame: Frame, deadline: float) -> None:
        """Send one frame within `deadline` seconds; returns when gRPC has taken all of it.

        A frame that is not finished, for whatever reason, ends the link.
        """
        header = frame_header_to_pb(frame.id, frame.tensors)
        is_under_way = False
        if self._failure is not None:
            raise self._failure
        try:
            async with asyncio.timeout(deadline), self._send_lock:
                is_under_way = True
                pieces = chunks(frame)
                if self._is_to_be_timed(frame):
                    await self._write(LinkMessage(header=header))
                    await hooks.current().before_frame(frame)
                else:
                    await hooks.current().before_frame(frame)
                    await self._write(LinkMessage(header=header, chunk=next(pieces, None)))
                for chunk in pieces:
                    await self._write(LinkMessage(chunk=chunk))
                is_under_way = False
        except TimeoutError:
            raise self._lost(f"it took no frame for {deadline:.0f} s") from None
        except _STREAM_ERRORS as error:
            raise self._failure or self._lost(error) from None
        except asyncio.CancelledError:
            # gRPC raises it out of a write whose call has ended; only a real cancellation may pass.
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise self._failure or self._lost("the stream has ended") from None
        finally:
            if is_under_way:  # another frame behind a half one would be taken for corrupt
                self._fail(self._lost("a frame to it was not finished"))
        self.bytes_sent += header.ByteSize() + len(frame.payload)

    @property
    def is_closed_here(self) -> bool:
        """Whether this end closed the link, with nothing to complain of."""
        return self._closed_here

    async def take(self, frame_id: FrameId, deadline: float) -> Frame:
        """The frame named `frame_id`, waiting up to `deadline` seconds. Each frame is handed out once."""
        try:
            if frame_id not in self._inbox:
                async with asyncio.timeout(deadline):
                    await self._arrival(frame_id)
        except TimeoutError:
            raise HetnodeError(
                ErrorCode.NEIGHBOUR_LOST,
                f"{self._name} sent no {frame_id.kind.value} frame for microbatch {frame_id.microbatch} of "
                f"inner step {frame_id.step} in round {frame_id.round_number} within {deadline:.0f} s.",
                "Check that neighbour's log and connection; timing.link in the run file sets the bound.",
            ) from None
        self._has_room.set()
        return self._inbox.pop(frame_id)

    async def part(self, deadline: float) -> None:
        """Say farewell and wait up to `deadline` seconds for the neighbour's; only then closing harms nobody.

        A neighbour that closes while our last write is still under way would make it fail. Never raises: a
        neighbour that is gone needs no farewell.
        """
        with suppress(HetnodeError):
            await self.send(Frame(_FAREWELL, (), b""), deadline)
        with suppress(HetnodeError):
            await self.take(_FAREWELL, deadline)

    async def drop_before(self, round_number: int) -> None:
        """Forget frames of rounds before `round_`: stale work must never count."""
        stale = [frame_id for frame_id in self._inbox if frame_id.round_number < round_number]
        for frame_id in stale:
            del self._inbox[frame_id]
        self.frames_dropped += len(stale)
        self._has_room.set()

    async def wait_closed(self) -> HetnodeError:
        """Return why the link ended, when it ends."""
        await self._ended.wait()
        assert self._failure is not None
        return self._failure

    async def close(self, reason: HetnodeError | None = None) -> None:
        """End the link, for `reason` if there is one."""
        self._reader.cancel()
        with suppress(asyncio.CancelledError):
            await self._reader
        self._closed_here = reason is None and self._failure is None
        self._fail(reason or self._lost("the link was closed here"))

    async def _receive_all(self) -> None:
        try:
            while (message := await _decoded(self._read())) is not grpc.aio.EOF:
                frame = self._accept(message)
                if frame is not None:
                    self._tell_received(len(frame.payload))
                    await self._store(frame)
            self._fail(self._lost("it closed the stream"))
        except HetnodeError as error:
            log.error("link to %s: %s", self._name, error)
            self._fail(error)
        except _STREAM_ERRORS as error:
            self._fail(error_from_rpc(error) or self._lost(error))
        except Exception as error:
            # Whoever waits for a frame must hear of it, even of a fault in this program.
            log.exception("link to %s", self._name)
            self._fail(self._lost(f"reading from it failed ({error!r})"))

    def _is_to_be_timed(self, frame: Frame) -> bool:
        """Whether the header of `frame` travels ahead, so that the other end can time what follows."""
        now = clock()
        if len(frame.payload) < LEAST_FRAME_BYTES or now < self._timed_at + _TIMED_EVERY_SECONDS:
            return False
        self._timed_at = now
        return True

    def _accept(self, message: LinkMessage) -> Frame | None:
        if message.hello is not None or (message.header is None and message.chunk is None):
            raise HetnodeError(
                ErrorCode.FRAME_CORRUPT,
                f"{self._name} sent a message that is neither a frame header nor a chunk.",
                "The stream is closed; check that both ends run the same version.",
            )
        frame = None
        if message.header is not None:
            self._frame_began, self._came_at_once = clock(), len(message.chunk or b"")
            self.bytes_received += message.header.ByteSize() + message.header.nbytes
            frame = self._assembler.header(*frame_header_from_pb(message.header))
        if message.chunk is not None:
            frame = self._assembler.chunk(message.chunk)
        return frame

    def _tell_received(self, nbytes: int) -> None:
        timed = nbytes - self._came_at_once
        if timed and self._received is not None and not self._was_held_up:
            self._received(self.neighbour.peer, timed, clock() - self._frame_began)

    async def _store(self, frame: Frame) -> None:
        self._was_held_up = len(self._inbox) >= self._room
        while len(self._inbox) >= self._room:
            self._has_room.clear()
            await self._has_room.wait()
        self._inbox[frame.id] = frame  # a repeated frame replaces its equal, so it cannot count twice
        _wake(self._awaited.get(frame.id, ()))

    async def _arrival(self, frame_id: FrameId) -> None:
        """Return when the frame is in the inbox; raise what ended the link, if that comes first."""
        while frame_id not in self._inbox:
            if self._failure is not None:
                raise self._failure
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._awaited[frame_id].append(waiter)
            try:
                await waiter
            finally:
                self._awaited[frame_id].remove(waiter)
                if not self._awaited[frame_id]:
                    del self._awaited[frame_id]

    def _fail(self, error: HetnodeError) -> None:
        self._failure = self._failure or error
        self._ended.set()
        for waiters in self._awaited.values():
            _wake(waiters)

    @property
    def _name(self) -> str:
        return _name(self.neighbour)

    def _lost(self, why: object) -> HetnodeError:
        if isinstance(why, grpc.aio.AioRpcError):
            why = f"{why.code().name}: {why.details()}"
        return HetnodeError(
            ErrorCode.NEIGHBOUR_LOST,
            f"{self._name} is gone: {why}.",
            "Its log says why; without it this replica cannot go on, the others can.",
        )


def _wake(waiters: Iterable[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)


@dataclass(frozen=True)
class _Expectation:
    here: LinkEndpoint
    neighbour: LinkEndpoint
    limits: LinkLimits
    link: asyncio.Future[Link]


class LinkServer:
    """Accepts links from neighbours that dial. Streams that nobody here expects are refused after a while.

    Args:
        credentials: what to show, and whom to believe, at a new connection; renewed ones are seen at once.
        received: told of the frames of its links.
    """

    def __init__(self, credentials: Callable[[], Credentials], received: Received | None = None) -> None:
        self._credentials, self._received = credentials, received
        self._probes = ProbeDoor(_PROBES_AT_ONCE, time.monotonic)
        self._banned: Callable[[], Set[PeerId]] = frozenset
        self._expected: dict[PeerId, _Expectation] = {}
        self._expectations = asyncio.Condition()
        self._streams: Counter[str] = Counter()
        self._server = grpc.aio.server(options=stream_options(), maximum_concurrent_rpcs=_MAX_STREAMS)
        self._server.add_generic_rpc_handlers((_handlers(self),))

    async def start(self, host: str, port: int) -> int:
        """Listen and return the bound port. Raises HetnodeError PORT_IN_USE."""
        try:
            bound = self._server.add_secure_port(f"{host}:{port}", server_credentials(self._credentials))
        except RuntimeError:
            bound = 0
        if not bound:
            raise HetnodeError(
                ErrorCode.PORT_IN_USE,
                f"Cannot listen for links on {host}:{port}: the port is taken or the address is not ours.",
                "Give another --listen HOST:PORT; port 0 takes a free one.",
            )
        await self._server.start()
        return bound

    async def accept(
        self, here: LinkEndpoint, neighbour: LinkEndpoint, limits: LinkLimits, deadline: float
    ) -> Link:
        """The link that `neighbour` opens to `here`, waiting up to `deadline` seconds for it."""
        future: asyncio.Future[Link] = asyncio.get_running_loop().create_future()
        async with self._expectations:
            expectation = self._expected[neighbour.peer] = _Expectation(here, neighbour, limits, future)
            self._expectations.notify_all()
        try:
            return await asyncio.wait_for(future, deadline)
        except TimeoutError:
            raise _unreachable(neighbour, f"it did not open its link within {deadline:.0f} s") from None
        finally:
            if (
                self._expected.get(neighbour.peer) is expectation
            ):  # a later wait for the same peer is not ours
                del self._expected[neighbour.peer]

    async def close(self) -> None:
        await self._server.stop(grace=1.0)

    def keep_out(self, banned: Callable[[], Set[PeerId]]) -> None:
        """From now on those who are `banned` by then may not probe; their links end with the plans."""
        self._banned = banned

    def spare(self, is_busy: Callable[[], bool]) -> None:
        """From now on probes get no more than echoes while this node `is_busy`."""
        self._probes.is_busy = is_busy

    async def Probe(
        self, requests: AsyncIterator[pb.ProbeMessage], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        caller = identity_of(context)
        try:
            if peer_of(caller) in self._banned():
                raise _refusal(ErrorCode.BANNED, f"{caller} is banned from the run")
            await answer_probe(requests, context, self._probes)
        except HetnodeError as error:
            log.debug("refused a probe of %s: %s", caller, error)
            await abort_with(context, error)

    async def Exchange(
        self, requests: AsyncIterator[LinkMessage], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        caller = identity_of(context)
        self._streams[caller] += 1
        try:
            await self._serve(caller, context)
        finally:
            self._streams[caller] -= 1
            if not self._streams[caller]:
                del self._streams[caller]

    async def _serve(self, caller: str, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """One stream that the holder of a certificate for the URI `caller` has opened."""
        try:
            async with asyncio.timeout(_HANDSHAKE_SECONDS):
                if self._streams[caller] > _STREAMS_PER_PEER:
                    raise _refusal(ErrorCode.RATE_LIMITED, f"{caller} has {_STREAMS_PER_PEER} streams open")
                first = await _decoded(context.read())
                if first is grpc.aio.EOF or first.hello is None or first.chunk is not None:
                    raise _refusal(ErrorCode.FRAME_CORRUPT, "the first message of a link must be a hello")
                _check_versions(first.hello)
                peer = PeerId(first.hello.peer)
                if caller != peer_uri(peer):
                    raise _refusal(
                        ErrorCode.CERTIFICATE_REFUSED,
                        f"{peer!r:.80} came with the certificate of {caller!r:.100}",
                    )
                async with self._expectations:
                    await self._expectations.wait_for(lambda: peer in self._expected)
                expected = self._expected[peer]
                _check_hello(first.hello, expected.neighbour)
                await context.write(LinkMessage(hello=_hello(expected.here)))
        except TimeoutError:
            log.warning("refused a link of %s: nobody here expects it", caller)
            await abort_with(context, _refusal(ErrorCode.UNKNOWN_PEER, "nobody here expects this link"))
        except HetnodeError as error:
            expected_soon = error.code is ErrorCode.UNKNOWN_PEER  # it tries again until both are equally far
            log.log(
                logging.DEBUG if expected_soon else logging.WARNING, "refused a link of %s: %s", caller, error
            )
            await abort_with(context, error)
        else:
            link = Link(expected.neighbour, context.read, context.write, expected.limits, self._received)
            if expected.link.done():
                await link.close()
                return
            expected.link.set_result(link)
            reason = await link.wait_closed()
            if not link.is_closed_here:
                await abort_with(context, reason)


def _handlers(servicer: LinkServer) -> grpc.GenericRpcHandler:
    """As protoc generates them, but for the messages of Exchange."""
    exchange = grpc.stream_stream_rpc_method_handler(
        servicer.Exchange, LinkMessage.from_bytes, LinkMessage.to_bytes
    )
    probe = grpc.stream_stream_rpc_method_handler(
        servicer.Probe, pb.ProbeMessage.FromString, pb.ProbeMessage.SerializeToString
    )
    return grpc.method_handlers_generic_handler(_SERVICE, {"Exchange": exchange, "Probe": probe})


class Links:
    """This node's links to its neighbours: those that it dials and those that it accepts.

    Args:
        server: where it listens; None where it only dials.
        credentials: what to show; renewed ones are shown at once.
        received: told of the frames of links that are dialled.
    """

    def __init__(
        self,
        server: LinkServer | None,
        credentials: Callable[[], Credentials],
        received: Received | None = None,
    ) -> None:
        self._server, self._credentials, self._received = server, credentials, received

    async def dial(
        self, endpoint: str, here: LinkEndpoint, neighbour: LinkEndpoint, limits: LinkLimits, deadline: float
    ) -> Link:
        """As :func:`dial`."""
        return await dial(endpoint, here, neighbour, limits, deadline, self._credentials(), self._received)

    async def accept(
        self, here: LinkEndpoint, neighbour: LinkEndpoint, limits: LinkLimits, deadline: float
    ) -> Link:
        """As :meth:`LinkServer.accept`."""
        assert self._server is not None, "the plan lets only those accept that listen"
        return await self._server.accept(here, neighbour, limits, deadline)


async def dial(
    endpoint: str,
    here: LinkEndpoint,
    neighbour: LinkEndpoint,
    limits: LinkLimits,
    deadline: float,
    credentials: Credentials,
    received: Received | None = None,
) -> Link:
    """Open the link from `here` to `neighbour` at `endpoint`, retrying until `deadline` seconds have passed.

    Raises HetnodeError NEIGHBOUR_UNREACHABLE; CERTIFICATE_REFUSED where another than the neighbour answers;
    or the neighbour's refusal.
    """
    channel = open_channel(endpoint, credentials, tls_name(neighbour.peer), stream_options())
    exchange: Any = channel.stream_stream(
        f"/{_SERVICE}/Exchange", LinkMessage.to_bytes, LinkMessage.from_bytes
    )
    unanswered = ""
    try:
        async with asyncio.timeout(deadline):
            while True:
                call = exchange()
                try:
                    await call.write(LinkMessage(hello=_hello(here)))
                    answer = await _decoded(call.read())
                    if answer is grpc.aio.EOF or answer.hello is None or answer.chunk is not None:
                        raise _unreachable(neighbour, "it closed the stream without a greeting")
                    _check_versions(answer.hello)
                    _check_hello(answer.hello, neighbour)
                except _STREAM_ERRORS:
                    status = await _status_of(call)
                    if why := tls_failure(status):
                        raise _refusal(
                            ErrorCode.CERTIFICATE_REFUSED,
                            f"what answers at {endpoint} has no certificate of {neighbour.peer} ({why})",
                        ) from None
                    refusal = error_from_rpc(status)
                    if refusal is None and status.code() is grpc.StatusCode.UNAVAILABLE:
                        unanswered = str(status.details())[:200]
                    if refusal is None or refusal.code is ErrorCode.UNKNOWN_PEER:
                        await asyncio.sleep(0.2)  # the neighbour has not seen the plan yet, or is starting
                        continue
                    raise refusal from None
                link = Link(neighbour, call.read, call.write, limits, received)
                link_closed = asyncio.create_task(_close_channel_after(link, call, channel))
                _background.add(link_closed)
                link_closed.add_done_callback(_background.discard)
                return link
    except TimeoutError:
        await channel.close()
        why = f"no answer from {endpoint} within {deadline:.0f} s {unanswered}".strip()
        raise _unreachable(neighbour, why) from None
    except BaseException:
        await channel.close()
        raise


_background: set[asyncio.Task[None]] = set()


async def _close_channel_after(link: Link, call: Any, channel: grpc.aio.Channel) -> None:
    await link.wait_closed()
    call.cancel()
    await channel.close()


async def _status_of(call: Any) -> grpc.RpcError:
    return grpc.aio.AioRpcError(
        await call.code(), await call.initial_metadata(), await call.trailing_metadata(), await call.details()
    )


def _name(place: LinkEndpoint) -> str:
    return f"Member {place.position} of replica {place.replica} ({place.peer})"


def stream_options() -> tuple[tuple[str, int], ...]:
    """gRPC settings of a link, the same at both ends."""
    keepalive = round(KEEPALIVE_SECONDS * 1000)
    return (
        ("grpc.max_receive_message_length", CHUNK_BYTES + 4096),
        ("grpc.max_send_message_length", CHUNK_BYTES + 4096),
        ("grpc.so_reuseport", 0),
        ("grpc.keepalive_time_ms", keepalive),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 2000),
        ("grpc.http2.max_pings_without_data", 0),
        # Unless told otherwise, a server takes frequent probes of an idle connection for an attack.
        ("grpc.http2.min_ping_interval_without_data_ms", keepalive // 4),
    )


async def _decoded(read: Awaitable[Any]) -> Any:
    """The message of `read`. HetnodeError FRAME_CORRUPT for bytes that are none."""
    try:
        message = await read
    except DecodeError:
        message = None
    # At the end that has dialled, gRPC logs what the decoder raises, and gives None.
    if message is None:
        raise _refusal(ErrorCode.FRAME_CORRUPT, "its bytes are no message of a link")
    return message


def _hello(place: LinkEndpoint) -> pb.Hello:
    return pb.Hello(
        protocol_version=PROTOCOL_VERSION,
        run=place.run,
        spec_hash=place.spec_hash,
        peer=place.peer,
        replica=place.replica,
        position=place.position,
        epoch=place.epoch,
        round=place.round_number,
    )


def _check_versions(hello: pb.Hello) -> None:
    if hello.protocol_version != PROTOCOL_VERSION:
        raise HetnodeError(
            ErrorCode.VERSION_MISMATCH,
            f"The neighbour speaks protocol version {hello.protocol_version}, this node {PROTOCOL_VERSION}.",
            "Install the same version of hetnode on both.",
        )


def _check_hello(hello: pb.Hello, expected: LinkEndpoint) -> None:
    if hello.spec_hash != expected.spec_hash or hello.run != expected.run:
        raise HetnodeError(
            ErrorCode.SPEC_MISMATCH,
            f"The neighbour has run {hello.run!r:.80} with spec {hello.spec_hash!r:.80}, this node has "
            f"{expected.run} with {expected.spec_hash}.",
            "Let both join through the same coordinator.",
        )
    if (hello.epoch, hello.round) != (expected.epoch, expected.round_number):
        raise _refusal(
            ErrorCode.UNKNOWN_PEER,
            f"{expected.peer} is expected in round {expected.round_number} of plan {expected.epoch}, "
            f"not in round {hello.round} of plan {hello.epoch}",
        )
    if (hello.peer, hello.replica, hello.position) != (expected.peer, expected.replica, expected.position):
        raise _refusal(
            ErrorCode.UNKNOWN_PEER,
            f"expected {expected.peer} at position {expected.position} of replica {expected.replica}, "
            f"not {hello.peer!r:.80} at {hello.position} of {hello.replica}",
        )


def _refusal(code: ErrorCode, why: str) -> HetnodeError:
    return HetnodeError(
        code, f"This link is refused: {why}.", "Join through the coordinator; it names neighbours."
    )


def _unreachable(neighbour: LinkEndpoint, why: str) -> HetnodeError:
    return HetnodeError(
        ErrorCode.NEIGHBOUR_UNREACHABLE,
        f"{_name(neighbour)} cannot be reached: {why}.",
        "Check that its advertised address and port are open to this machine.",
    )
