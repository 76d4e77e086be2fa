"""Calls from a node's main process to its children (worker, host of the transport).

One Unix socket pair for each child carries messages with a length prefix: a header, the call or its answer
as JSON, and blobs of bytes. The main process never pickles and never blocks; a child reads further calls
while it computes. A child ends when the socket closes, so it cannot outlive the main process, even after
SIGKILL of that process.

:class:`Child` calls from an event loop, :class:`Connection` from threads; :func:`serve` answers both.
:mod:`protocol.wire.typed_calls` makes calls of dataclasses.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import struct
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from node.ipc.template import ForkedProcess, TemplateEnded, own_template
from protocol.errors import ErrorCode, HetnodeError
from protocol.wire.record_codec import UNBOUNDED, Buffer, RecordCodec
from protocol.wire.typed_calls import Call, Handler, Reply

log = logging.getLogger(__name__)

_PREFIX = struct.Struct("<II")  # bytes of the header, number of blobs
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class Failure:
    """An error as it travels. `code` is the label of a HetnodeError's code, or None for a bug."""

    code: str | None
    cause: str
    remedy: str = ""

    @classmethod
    def of(cls, error: Exception) -> Failure:
        if isinstance(error, HetnodeError):
            return cls(error.code.label, error.cause, error.remedy)
        return cls(None, repr(error))

    def error(self, name: str) -> Exception:
        """The error again, as the process `name` has raised it."""
        if self.code is None:
            return RuntimeError(f"{name}: {self.cause}")
        return HetnodeError(ErrorCode.from_label(self.code), self.cause, self.remedy)


@dataclass(frozen=True)
class Header:
    """The head of a message: the number of the call, and its method, or the failure that answers it."""

    call: int
    method: str = ""
    failure: Failure | None = None


@dataclass(frozen=True)
class Packet:
    """What is read at once: a call, an answer or a failure."""

    header: Header
    body: bytes | bytearray
    blobs: Sequence[Buffer]


_HEADER = RecordCodec[Header](Header, UNBOUNDED)


def encode_message(header: Header, body: Buffer = b"", blobs: Sequence[Buffer] = ()) -> list[Buffer]:
    """The parts of a message, to be written one after the other."""
    start = _HEADER.encode(header)
    parts: Sequence[Buffer] = (body, *blobs)
    lengths = b"".join(_LENGTH.pack(memoryview(part).nbytes) for part in parts)
    return [_PREFIX.pack(len(start), len(parts)) + start + lengths, *parts]


def encode_failure(call: int, error: Exception) -> list[Buffer]:
    """The message that answers `call` with `error`."""
    return encode_message(Header(call, failure=Failure.of(error)))


async def read_message(reader: asyncio.StreamReader, most_bytes: int = sys.maxsize) -> Packet:
    """The next message.

    Raises IncompleteReadError at the end of the stream, ValueError for what is no message, and
    ConnectionError for a message of more than `most_bytes`, of which nothing is kept.
    """
    size, count = _PREFIX.unpack(await reader.readexactly(_PREFIX.size))
    if size + count * _LENGTH.size > most_bytes:
        raise ConnectionError("The header of a message is too long.")
    header = _HEADER.read(await reader.readexactly(size))
    lengths = [n for (n,) in _LENGTH.iter_unpack(await reader.readexactly(count * _LENGTH.size))]
    if not lengths or sum(lengths) > most_bytes:
        raise ConnectionError("A message is too long, or has no body.")
    body, *blobs = [await reader.readexactly(n) for n in lengths]
    return Packet(header, body, blobs)


class StreamChannel:
    """Calls over a stream, from an event loop, to a process that answers as :func:`serve` does.

    Calls may overlap; each is answered once. When the stream ends, every open and every later call raises
    the reason, :meth:`_death`.

    Args:
        most_bytes: of a message that the other side may send; a longer one ends the channel.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        name: str,
        most_bytes: int = sys.maxsize,
    ) -> None:
        self._reader, self._writer, self._name, self._most_bytes = reader, writer, name, most_bytes
        self._calls: dict[int, asyncio.Future[Reply]] = {}
        self._next_call = 0
        self._listen = asyncio.create_task(self._read_replies(), name=f"{name}-replies")

    @property
    def end(self) -> HetnodeError | None:
        """What every call raises, because the process has ended; None while it lives."""
        return self._death() if self._listen.done() else None

    def call(self, call: Call) -> Awaitable[Reply]:
        """Queue a call and return the future of its reply. Calls arrive in the order of `call`.

        Raises (from the future): HetnodeError as raised by the handler, or because the process has ended.
        """
        if self._listen.done():
            raise self._death()
        self._next_call += 1
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._calls[self._next_call] = future
        for part in encode_message(Header(self._next_call, call.method), call.body, call.blobs):
            self._writer.write(part)
        return future

    async def wait_closed(self) -> None:
        """Return when the process has ended or closed its socket."""
        await asyncio.wait({self._listen})

    async def close(self, grace: float) -> None:
        """Close the stream. Open calls fail."""
        self._writer.close()
        self._listen.cancel()
        self._fail_all()

    async def _read_replies(self) -> None:
        try:
            while True:
                message = await read_message(self._reader, self._most_bytes)
                future = self._calls.pop(message.header.call)
                if not future.done():  # the caller may have been cancelled
                    _resolve(future, message, self._name)
        except (asyncio.IncompleteReadError, OSError, ValueError, KeyError):
            self._fail_all()

    def _fail_all(self) -> None:
        calls, self._calls = self._calls, {}
        for future in calls.values():
            if not future.done():
                future.set_exception(self._death())
                future.exception()  # a caller that was cancelled meanwhile is not owed a warning

    def _death(self) -> HetnodeError:
        return _death(ErrorCode.WORKER_DIED, self._name)


class Child(StreamChannel):
    """A child process seen from the main process's event loop. Create it with :func:`start_child`.

    When the child dies, calls raise HetnodeError with the code given to :func:`start_child`.
    """

    def __init__(
        self,
        process: ForkedProcess,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        name: str,
        died: ErrorCode,
    ) -> None:
        super().__init__(reader, writer, name)
        self._process, self._died = process, died

    @property
    def pid(self) -> int:
        """Known once the child has answered a call; before that, it blocks until the child was forked."""
        return self._process.pid

    async def close(self, grace: float) -> None:
        """Close the socket, wait up to `grace` seconds for a clean end, then SIGKILL."""
        self._writer.close()
        try:
            async with asyncio.timeout(grace):
                await self._process.wait_async()
        except TimeoutError:
            log.warning("The %s process did not end within %.0f s: killing it.", self._name, grace)
            self._process.kill()
            await self._process.wait_async()
        self._listen.cancel()
        self._fail_all()

    def _death(self) -> HetnodeError:
        return _death(self._died, f"{self._name} process", self._process.poll())


class Connection:
    """Blocking calls to a process that runs :func:`serve`, for a parent without an event loop.

    May be used by several threads; calls overlap. When the other side closes the socket, every open and
    every later call raises HetnodeError with the code `died`.
    """

    def __init__(self, connection: socket.socket, name: str, died: ErrorCode) -> None:
        self._connection, self._name, self._died = connection, name, died
        self._send_lock = threading.Lock()
        self._lock = threading.Lock()  # over the fields below
        self._calls: dict[int, Future[Reply]] = {}
        self._next_call = 0
        self._closed = False
        threading.Thread(target=self._read_replies, name=f"{name}-replies", daemon=True).start()

    def call(self, call: Call) -> Reply:
        """Call and wait for the reply.

        Raises HetnodeError as raised by the handler, or with the `died` code.
        """
        future: Future[Reply] = Future()
        with self._lock:
            if self._closed:
                raise _death(self._died, self._name)
            self._next_call += 1
            self._calls[self._next_call] = future
            header = Header(self._next_call, call.method)
        # The reader sees a closed socket, too, and fails the call.
        with self._send_lock, suppress(OSError):
            for part in encode_message(header, call.body, call.blobs):
                self._connection.sendall(part)
        return future.result()

    def _read_replies(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                message = _receive_message(self._connection)
                with self._lock:
                    future = self._calls.pop(message.header.call)
                _resolve(future, message, self._name)
        with self._lock:
            self._closed = True
            calls, self._calls = self._calls, {}
        for future in calls.values():
            future.set_exception(_death(self._died, self._name))


def _resolve(future: asyncio.Future[Reply] | Future[Reply], message: Packet, name: str) -> None:
    """Give the waiting caller what :func:`serve` answered."""
    if message.header.failure is None:
        future.set_result(Reply(message.body, message.blobs))
    else:
        future.set_exception(message.header.failure.error(name))


def _death(died: ErrorCode, who: str, status: int | None = None) -> HetnodeError:
    return HetnodeError(
        died,
        f"The {who} has ended{'' if status is None else f' with {status}'}.",
        "See the end of this node's log, then start the node again.",
    )


async def start_child(
    module: str,
    *,
    name: str,
    died: ErrorCode,
    environment: Mapping[str, str],
    descriptors: Sequence[int] = (),
) -> Child:
    """Start a process that serves calls, and connect to it. It is forked from this process's template.

    Returns at once; the first calls wait until the process serves.

    Args:
        module: its ``main`` calls :func:`serve` with the descriptor of its first argument.
        name: for logs and errors.
        died: code of the errors that calls raise once the child has ended.
        environment: added to this process's environment.
        descriptors: open in the child under the same numbers.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            process = own_template().fork(
                module,
                [str(theirs.fileno())],
                environment={**os.environ, **environment},
                descriptors=[theirs.fileno(), *descriptors],
            )
        except TemplateEnded as error:
            ours.close()
            raise _death(died, f"{name} process") from error
    reader, writer = await asyncio.open_connection(sock=ours, limit=2**20)
    return Child(process, reader, writer, name, died)


def serve(
    descriptor: int,
    handlers: Mapping[str, Handler],
    threads: int = 1,
    on_close: Callable[[], None] = lambda: None,
) -> None:
    """Answer the parent's calls until it closes the socket, then end this process at once.

    With one thread, calls run strictly in order while the next ones are read ahead; with more they overlap
    and may answer out of order. A handler's HetnodeError travels to the caller; any other exception is
    logged here with its traceback and reported as an internal failure. `on_close` is called after the socket
    has closed, before the end: it removes what must not be left behind.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection = socket.socket(fileno=descriptor)
    connection.setblocking(True)
    # A forked child that kept the socket open would hide this process's death from the parent.
    os.register_at_fork(after_in_child=connection.close)
    send_lock = threading.Lock()
    pool = ThreadPoolExecutor(threads)

    def answer(message: Packet) -> None:
        call, method = message.header.call, message.header.method
        try:
            reply = handlers[method](Call(method, message.body, message.blobs))
            parts = encode_message(Header(call), reply.body, reply.blobs)
        except Exception as error:
            if not isinstance(error, HetnodeError):
                log.exception("call %s failed", method)
            parts = encode_failure(call, error)
        with send_lock, suppress(OSError):
            for part in parts:
                connection.sendall(part)

    try:
        while True:
            pool.submit(answer, _receive_message(connection))
    except (EOFError, OSError):
        on_close()
        logging.shutdown()
        os._exit(0)  # a running computation must not delay the end of the node


def _receive_message(connection: socket.socket) -> Packet:
    size, count = _PREFIX.unpack(_receive(connection, _PREFIX.size))
    header = _HEADER.read(_receive(connection, size))
    lengths = _receive(connection, count * _LENGTH.size)
    body, *blobs = [_receive(connection, n) for (n,) in _LENGTH.iter_unpack(lengths)]
    return Packet(header, body, blobs)


def _receive(connection: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        received = connection.recv_into(view)
        if not received:
            raise EOFError
        view = view[received:]
    return data
