"""Calls from a node's main process to its children (worker, hivemind host).

One Unix socket pair for each child carries messages with a length prefix: a JSON header and blobs of bytes.
The main process never pickles and never blocks; a child reads further calls while it computes. A child ends
when the socket closes, so it cannot outlive the main process, even after SIGKILL of that process.

:class:`Child` calls from an event loop, :class:`Connection` from threads; :func:`serve` answers both.
"""

from __future__ import annotations

import asyncio
import json
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
from typing import Any

from node.ipc.template import ForkedProcess, TemplateEnded, own_template
from protocol.errors import ErrorCode, HetnodeError

log = logging.getLogger(__name__)

_PREFIX = struct.Struct("<II")  # bytes of the JSON header, number of blobs
_LENGTH = struct.Struct("<Q")

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True)
class Reply:
    """What a handler answers: a JSON object and byte blobs."""

    body: Mapping[str, Any]
    blobs: Sequence[Buffer] = ()


Handler = Callable[[Mapping[str, Any], Sequence[Buffer]], Reply]


def encode_message(header: Mapping[str, Any], blobs: Sequence[Buffer] = ()) -> list[Buffer]:
    """The parts of a message, to be written one after the other."""
    text = json.dumps(header, separators=(",", ":")).encode()
    lengths = b"".join(_LENGTH.pack(memoryview(blob).nbytes) for blob in blobs)
    return [_PREFIX.pack(len(text), len(blobs)) + text + lengths, *blobs]


async def read_message(
    reader: asyncio.StreamReader, most_bytes: int = sys.maxsize
) -> tuple[Mapping[str, Any], Sequence[Buffer]]:
    """The header and the blobs of the next message.

    Raises IncompleteReadError at the end of the stream, and ConnectionError for a message of more than
    `most_bytes`, of which nothing is kept.
    """
    header_size, count = _PREFIX.unpack(await reader.readexactly(_PREFIX.size))
    if header_size + count * _LENGTH.size > most_bytes:
        raise ConnectionError("The header of a message is too long.")
    header = json.loads(await reader.readexactly(header_size))
    lengths = [n for (n,) in _LENGTH.iter_unpack(await reader.readexactly(count * _LENGTH.size))]
    if sum(lengths) > most_bytes:
        raise ConnectionError("A message is too long.")
    return header, [await reader.readexactly(n) for n in lengths]


def encode_failure(call: int, error: Exception) -> list[Buffer]:
    """The message that answers `call` with `error`; that of a bug has no code."""
    reason: dict[str, Any] = {"code": None, "cause": repr(error)}
    if isinstance(error, HetnodeError):
        reason = {"code": error.code.label, "cause": error.cause, "remedy": error.remedy}
    return encode_message({"call": call, "error": reason})


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

    def call(self, method: str, body: Mapping[str, Any], *blobs: Buffer) -> Awaitable[Reply]:
        """Queue a call and return the future of its reply. Calls arrive in the order of `call`.

        Raises (from the future): HetnodeError as raised by the handler, or because the process has ended.
        """
        if self._listen.done():
            raise self._death()
        self._next_call += 1
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._calls[self._next_call] = future
        header = {"call": self._next_call, "method": method, "body": body}
        for part in encode_message(header, blobs):
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
                header, blobs = await read_message(self._reader, self._most_bytes)
                future = self._calls.pop(header["call"])
                if not future.done():  # the caller may have been cancelled
                    _resolve(future, header, blobs, self._name)
        except (asyncio.IncompleteReadError, OSError):
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
            await asyncio.wait_for(self._process.wait_async(), grace)
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

    def call(self, method: str, body: Mapping[str, Any], *blobs: Buffer) -> Reply:
        """Call and wait for the reply.

        Raises HetnodeError as raised by the handler, or with the `died` code.
        """
        future: Future[Reply] = Future()
        with self._lock:
            if self._closed:
                raise _death(self._died, self._name)
            self._next_call += 1
            self._calls[self._next_call] = future
            header = {"call": self._next_call, "method": method, "body": body}
        # The reader sees a closed socket, too, and fails the call.
        with self._send_lock, suppress(OSError):
            for part in encode_message(header, blobs):
                self._connection.sendall(part)
        return future.result()

    def _read_replies(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                header, blobs = _receive_message(self._connection)
                with self._lock:
                    future = self._calls.pop(header["call"])
                _resolve(future, header, blobs, self._name)
        with self._lock:
            self._closed = True
            calls, self._calls = self._calls, {}
        for future in calls.values():
            future.set_exception(_death(self._died, self._name))


def _resolve(
    future: asyncio.Future[Reply] | Future[Reply],
    header: Mapping[str, Any],
    blobs: Sequence[Buffer],
    name: str,
) -> None:
    """Give the waiting caller what :func:`serve` answered."""
    error = header.get("error")
    if error is None:
        future.set_result(Reply(header["body"], blobs))
    elif error["code"] is None:
        future.set_exception(RuntimeError(f"{name}: {error['cause']}"))
    else:
        code = ErrorCode.from_label(error["code"])
        future.set_exception(HetnodeError(code, error["cause"], error["remedy"]))


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

    def answer(header: Mapping[str, Any], blobs: Sequence[Buffer]) -> None:
        call = header["call"]
        try:
            reply = handlers[header["method"]](header["body"], blobs)
            message = encode_message({"call": call, "body": reply.body}, reply.blobs)
        except Exception as error:
            if not isinstance(error, HetnodeError):
                log.exception("call %s failed", header["method"])
            message = encode_failure(call, error)
        with send_lock, suppress(OSError):
            for part in message:
                connection.sendall(part)

    try:
        while True:
            pool.submit(answer, *_receive_message(connection))
    except (EOFError, OSError):
        on_close()
        logging.shutdown()
        os._exit(0)  # a running computation must not delay the end of the node


def _receive_message(connection: socket.socket) -> tuple[Mapping[str, Any], Sequence[Buffer]]:
    header_size, count = _PREFIX.unpack(_receive(connection, _PREFIX.size))
    header = json.loads(_receive(connection, header_size))
    lengths = _receive(connection, count * _LENGTH.size)
    return header, [_receive(connection, n) for (n,) in _LENGTH.iter_unpack(lengths)]


def _receive(connection: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        received = connection.recv_into(view)
        if not received:
            raise EOFError
        view = view[received:]
    return data
