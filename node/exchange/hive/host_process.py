"""The main process's end of one host process, with everything below it."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import TypeVar

from node.exchange.hive.calls import HiveRequest, JoinDht, Wake
from node.exchange.transport import Entry
from node.ipc.channel import Child, start_child
from node.security.identity import Identity
from protocol.errors import ErrorCode, HetnodeError
from protocol.server.line import UNLIMITED, Line
from protocol.wire.typed_calls import decode_answer, encode_request

Answer = TypeVar("Answer")

log = logging.getLogger(__name__)

_MOST_FOLDER = 60
_START_SECONDS = 60.0
_CLOSE_SECONDS = 5.0
_LOOK_SECONDS = 1.0
_GRACE_SECONDS = 15.0
"""The host counts as dead when it has not answered this many seconds after the deadline."""


class HostProcess:
    """A host. Create it with :meth:`start`, and let it :meth:`join` the DHT.

    When the host or a process below it dies, every open and every later call raises TRANSPORT_DIED.

    Attributes:
        addresses: multiaddresses under which other peers reach this one; empty in client mode.
    """

    def __init__(self, child: Child, folder: Path) -> None:
        self._child, self._folder = child, folder
        self.addresses: tuple[str, ...] = ()

    @classmethod
    async def start(cls, line: Line = UNLIMITED) -> HostProcess:
        """Start the host. Returns when it answers: to import its modules may have taken many seconds.

        Raises HetnodeError TRANSPORT_DIED; leaves nothing behind.
        """
        # The path of a socket has at most 104 bytes, of which the name below takes 40.
        is_short = len(os.fsencode(tempfile.gettempdir())) <= _MOST_FOLDER
        folder = Path(tempfile.mkdtemp(prefix="hetnode-", dir=None if is_short else "/tmp"))
        try:
            child = await start_child(
                f"{__package__}.host",
                name="hivemind",
                died=ErrorCode.TRANSPORT_DIED,
                environment=_environment(folder) | line.environment,
            )
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        host = cls(child, folder)
        try:
            await host.call(Wake(deadline=_START_SECONDS))
        except BaseException:  # also a cancellation must leave no process behind
            await host.close()
            raise
        return host

    async def join(self, identity: Identity, entry: Entry) -> None:
        """Join the DHT; the key of `identity` becomes that of the peer.

        Raises HetnodeError PORT_IN_USE, BAD_ADDRESS, DHT_UNREACHABLE, TRANSPORT_DIED.
        """
        joined = await self.call(
            JoinDht(entry, identity.peer, identity.path, self._folder, deadline=_START_SECONDS)
        )
        assert joined.peer == identity.peer, "p2pd and this process derive it from the same key"
        self.addresses = joined.addresses

    @property
    def pid(self) -> int:
        return self._child.pid

    async def call(self, request: HiveRequest[Answer]) -> Answer:
        """The answer of the host. Raises the HetnodeError of the host; TRANSPORT_DIED."""
        call = encode_request(request)
        reply = asyncio.ensure_future(self._child.call(call))
        patience = request.deadline + _GRACE_SECONDS
        try:
            # Waits are counted, not clock time: a suspended machine stops the host and this process alike.
            while patience > 0:
                done, _ = await asyncio.wait({reply}, timeout=_LOOK_SECONDS)
                if done:
                    return decode_answer(request, reply.result())
                patience -= _LOOK_SECONDS
        finally:
            reply.cancel()
        # A host that does not answer may hold a lock for ever: end it, so that all calls fail at once.
        await self._child.close(grace=0.0)
        raise HetnodeError(
            ErrorCode.TRANSPORT_DIED,
            f"The hivemind process did not answer {call.method} within "
            f"{request.deadline + _GRACE_SECONDS:.0f} s; it was ended.",
            "Start the node again.",
        )

    async def wait_closed(self) -> None:
        """Return when the host has ended."""
        await self._child.wait_closed()

    async def close(self) -> None:
        """End the host and everything below it, and remove its sockets. May be called again."""
        await self._child.close(_CLOSE_SECONDS)
        shutil.rmtree(self._folder, ignore_errors=True)


def _environment(folder: Path) -> dict[str, str]:
    return {
        "HETNODE_LOG_LEVEL": logging.getLevelName(log.getEffectiveLevel()),
        "TMPDIR": str(folder),  # multiprocessing keeps sockets there
        # p2pd is written in Go. Above this it frees memory at once, where it would let twice as much gather.
        "GOMEMLIMIT": "128MiB",
    }
