"""A follower: the process of a peer on several hosts that runs the worker of its rank for the leader."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Awaitable, Mapping
from contextlib import AsyncExitStack

from node.hosts.greeting import (
    FAREWELL,
    GREETING,
    MOST_BYTES,
    NOTE,
    Greeting,
    device_of,
    keep_alive,
    own_version,
)
from node.hosts.launch import Launch
from node.hosts.store import FindLeader, start_store
from node.ipc.channel import Child, Header, encode_failure, encode_message, read_message
from node.ipc.ranks import start_worker
from node.ipc.worker_client import WorkerClient
from protocol.errors import ErrorCode, HetnodeError
from protocol.wire.typed_calls import Call, Reply

_GREETING_SECONDS, _PAUSE_SECONDS, _RETURN_SECONDS = 10.0, 0.5, 10.0
_MOST_CALL = 1 << 36
log = logging.getLogger(__name__)

_Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def follow(
    launch: Launch, device: str, choices: Mapping[str, str], threads: int, patience: float = 300.0
) -> None:
    """Run the worker of this rank for the leader, until the leader says that it has ended.

    Whenever the leader closes the connection, for example to rest, the worker ends and this process offers a
    new one; so it does when the worker has died, first where the memory of its machine is short. While a
    leader lives, SIGINT and SIGTERM do nothing: it saves the progress and ends all.

    Raises HetnodeError RANK_FAILED if no leader can be reached within `patience` seconds, or it has ended
    without a farewell; the leader's own error if it refuses this process; DEVICE_UNAVAILABLE;
    WORKER_DIED before it has served.
    """
    has_served = False
    while True:
        async with AsyncExitStack() as stack:
            store = await start_store(stack)
            name = f"worker of rank {launch.rank}"
            worker = await start_worker(name, max(1, threads // launch.local_size), stack)
            found = await device_of(worker, device, launch.local_rank)
            try:
                reader, writer = await _reach(store, launch, found, choices, patience)
            except HetnodeError as error:
                if has_served and error.code is ErrorCode.RANK_FAILED:
                    raise _lost("The leader of this peer has ended without a farewell.") from error
                raise
            stack.callback(writer.close)
            _leave_the_end_to_the_leader(stack)
            if not await _is_summoned(reader):
                return
            log.info("rank %d of %d of a peer: its leader is at %s", launch.rank, launch.size, launch.host)
            try:
                await _serve(worker, reader, writer)
            except HetnodeError as death:
                log.error("%s This rank starts it again.", death.cause)  # the leader ends after too many
        has_served, patience = True, _RETURN_SECONDS


async def _reach(
    store: WorkerClient, launch: Launch, device: str, choices: Mapping[str, str], patience: float
) -> _Connection:
    """A connection to a leader that has welcomed this process."""
    deadline = asyncio.get_running_loop().time() + patience
    while (left := deadline - asyncio.get_running_loop().time()) > 0:
        # The note can be one of an earlier leader: torchrun keeps its store when it starts processes again.
        found = await store.call(FindLeader(launch.host, launch.port, left))
        try:
            async with asyncio.timeout(_GREETING_SECONDS):
                note = NOTE.read(found)
                reader, writer = await asyncio.open_connection(launch.host, note.port)
                keep_alive(writer.get_extra_info("socket"))
                mine = Greeting(
                    note.token,
                    own_version(),
                    launch.rank,
                    launch.size,
                    socket.gethostname(),
                    device,
                    choices,
                )
                writer.writelines(encode_message(Header(0), GREETING.encode(mine)))
                await _told(reader)
                return reader, writer
        except (OSError, EOFError, ValueError) as error:
            log.debug("no leader yet: %r", error)
        await asyncio.sleep(_PAUSE_SECONDS)
    raise _lost(f"The leader of this peer, on {launch.host}, cannot be reached within {patience:.0f} s.")


async def _is_summoned(reader: asyncio.StreamReader) -> bool:
    """Wait until the leader needs the worker. False: it has ended in order."""
    try:
        return await _told(reader) != FAREWELL
    except (OSError, EOFError, ValueError):
        raise _lost("The leader of this peer has ended without a farewell.") from None


async def _told(reader: asyncio.StreamReader) -> Header:
    """What the leader says. Raises the error that it sends; else ValueError, OSError, EOFError."""
    header = (await read_message(reader, MOST_BYTES)).header
    if header.failure is not None:
        raise header.failure.error("the leader of this peer")
    return header


async def _serve(worker: Child, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass the leader's calls on to the worker, until the leader closes the connection.

    Raises HetnodeError WORKER_DIED.
    """
    passing = asyncio.create_task(_pass_calls(worker, reader, writer))
    ending = asyncio.create_task(worker.wait_closed())
    await asyncio.wait({passing, ending}, return_when=asyncio.FIRST_COMPLETED)
    if ending.done() and worker.end is not None:
        passing.cancel()
        await asyncio.sleep(0)  # open calls answer why
        raise worker.end
    ending.cancel()
    await passing


async def _pass_calls(worker: Child, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    answering: set[asyncio.Task[None]] = set()
    try:
        while True:
            message = await read_message(reader, _MOST_CALL)
            reply = worker.call(Call(message.header.method, message.body, message.blobs))
            task = asyncio.create_task(_answer(writer, message.header.call, reply))
            answering.add(task)
            task.add_done_callback(answering.discard)
    except (OSError, EOFError, ValueError):
        return


async def _answer(writer: asyncio.StreamWriter, call: int, reply: Awaitable[Reply]) -> None:
    try:
        found = await reply
        parts = encode_message(Header(call), found.body, found.blobs)
    except Exception as error:
        parts = encode_failure(call, error)
    writer.writelines(parts)


def _leave_the_end_to_the_leader(stack: AsyncExitStack) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(
            number, log.warning, "asked to end: this rank serves until the leader of its peer ends"
        )
        stack.callback(loop.remove_signal_handler, number)


def _lost(cause: str) -> HetnodeError:
    return HetnodeError(
        ErrorCode.RANK_FAILED,
        cause,
        "See the leader's log. Start all hosts again: the peer continues from its checkpoint.",
    )
