"""The leader of a peer on several hosts: the node whose followers run the workers of the other ranks."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from node.hosts.greeting import (
    FAREWELL,
    GREETING,
    MOST_BYTES,
    NOTE,
    SUMMONS,
    WELCOME,
    Greeting,
    LeaderNote,
    device_of,
    keep_alive,
    refusal,
)
from node.hosts.launch import Launch
from node.hosts.store import AnnounceLeader, start_store
from node.ipc.channel import StreamChannel, encode_failure, encode_message, read_message
from node.ipc.rank_channels import RankChannels
from node.ipc.ranks import form, start_worker
from node.ipc.worker_calls import FormGroup
from node.ipc.worker_client import WorkerClient
from protocol.errors import ErrorCode, HetnodeError, cause_of, first_error

_GREETING_SECONDS, _FAREWELL_SECONDS, _CLOSE_SECONDS = 10.0, 5.0, 3.0
_RETURN_SECONDS = 60.0
"""Followers that have worked come back within this time, also where their worker has died."""
_MOST_REPLY = 1 << 26
"""Bytes of a follower's reply. Payloads and tensors of the peer come from rank 0 alone."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Follower:
    greeting: Greeting
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class Leader:
    """Waits for the followers, and makes one worker of theirs and its own. Use as a context manager.

    At its end it tells every follower, which then ends too.

    Args:
        device: of rank 0; AUTO_DEVICE takes the GPU with its local rank.
        choices: the options that must be the same on all hosts, as text by name.
        sharded: as in :class:`node.ipc.ranks.DeviceList`.
        patience: seconds for all followers to come.
    """

    def __init__(
        self,
        launch: Launch,
        device: str,
        choices: Mapping[str, str],
        sharded: bool | None,
        patience: float = 300.0,
    ) -> None:
        self.sharded = sharded
        self._launch, self._device, self._choices, self._patience = launch, device, choices, patience
        self._token = secrets.token_hex(32)
        self._waiting: dict[int, _Follower] = {}
        self._returning: set[int] = set()  # ranks that come back after their last call
        self._told: set[int] = set()
        self._changed = asyncio.Event()
        self._refusal: HetnodeError | None = None
        self._farewell: list[bytes] = []
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Raises HetnodeError RANK_FAILED if the followers cannot be told where the leader is."""
        try:
            listener = _listening_socket()
            server = await asyncio.start_server(self._greet, sock=listener)
            self._stack.callback(server.close)
            store = await start_store(self._stack)
            note = NOTE.encode(LeaderNote(listener.getsockname()[1], self._token)).decode()
            place = self._launch.host, self._launch.port
            await store.call(AnnounceLeader(*place, self._launch.serves_store, note))
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        parts = encode_message(FAREWELL)
        if isinstance(error, Exception | BaseExceptionGroup):
            parts = encode_failure(0, _ended(first_error(error)))
        self._farewell = [bytes(part) for part in parts]
        expected = self._returning | set(self._waiting)
        for follower in self._waiting.values():
            self._tell(follower)
        with suppress(TimeoutError):
            async with asyncio.timeout(_FAREWELL_SECONDS):
                while not self._told >= expected:
                    await self._next_change()
        await self._stack.aclose()

    async def start(self, threads: int, processes: AsyncExitStack) -> WorkerClient:
        """The workers of all ranks, as one worker, which `processes` ends.

        Raises HetnodeError RANK_FAILED if a follower does not come, VERSION_MISMATCH or BAD_OPTION if one was
        started differently, DEVICE_UNAVAILABLE, WORKER_DIED.
        """
        first = await start_worker("worker of rank 0", max(1, threads // self._launch.local_size), processes)
        devices = [await device_of(first, self._device, self._launch.local_rank)]
        ranks: list[StreamChannel] = [first]
        for follower in await self._all_followers():
            for part in encode_message(SUMMONS):
                follower.writer.write(part)
            greeting = follower.greeting
            name = f"worker of rank {greeting.rank} on {greeting.host}"
            channel = StreamChannel(follower.reader, follower.writer, name, _MOST_REPLY)
            processes.push_async_callback(self._release, greeting.rank, channel)
            ranks.append(channel)
            devices.append(greeting.device)
        place, prefix = (self._launch.host, self._launch.port), f"hetnode/{secrets.token_hex(8)}"
        calls = [
            FormGroup(rank, len(ranks), device, *place, prefix=prefix) for rank, device in enumerate(devices)
        ]
        await form(ranks, calls)
        self._patience = min(self._patience, _RETURN_SECONDS)
        return WorkerClient(RankChannels(ranks), len(ranks), reads_files=False)

    async def gather(self) -> None:
        """Wait until all followers are here. Raises as :meth:`start`."""
        size = self._launch.size
        try:
            async with asyncio.timeout(self._patience):
                while missing := self._missing():
                    await self._next_change()
        except TimeoutError:
            raise HetnodeError(
                ErrorCode.RANK_FAILED,
                f"{len(missing)} of {size} ranks of this peer have not come within {self._patience:.0f} s, "
                f"the first of them rank {missing[0]}.",
                "Start torchrun on all hosts of the peer; each must reach this host at every port.",
            ) from None

    async def _all_followers(self) -> list[_Follower]:
        """All followers, by rank. They wait no longer."""
        await self.gather()
        self._returning.clear()
        return [self._waiting.pop(rank) for rank in range(1, self._launch.size)]

    async def _release(self, rank: int, channel: StreamChannel) -> None:
        """Let a follower end its worker. If it lives, it comes back."""
        if channel.end is None:
            self._returning.add(rank)
        await channel.close(_CLOSE_SECONDS)

    def _missing(self) -> list[int]:
        if self._refusal is not None:
            raise self._refusal
        here = {rank for rank, each in self._waiting.items() if not each.reader.at_eof()}
        return [rank for rank in range(1, self._launch.size) if rank not in here]

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take a follower, or close the connection of a stranger."""
        keep_alive(writer.get_extra_info("socket"))
        try:
            async with asyncio.timeout(_GREETING_SECONDS):
                greeting = GREETING.read((await read_message(reader, MOST_BYTES)).body)
            if not secrets.compare_digest(greeting.token.encode(), self._token.encode()):
                raise ValueError("another token")
        except (OSError, EOFError, ValueError) as error:
            log.debug("no follower: %r", error)
            writer.close()
            return
        if (refused := refusal(greeting, self._launch.size, self._choices)) is not None:
            self._refusal = refused
            writer.writelines(encode_failure(0, refused))
            writer.close()
        else:
            writer.writelines(encode_message(WELCOME))
            follower = self._waiting[greeting.rank] = _Follower(greeting, reader, writer)
            if self._farewell:
                self._tell(follower)
        self._changed.set()

    def _tell(self, follower: _Follower) -> None:
        follower.writer.writelines(self._farewell)
        follower.writer.close()
        self._told.add(follower.greeting.rank)

    async def _next_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()


def _listening_socket() -> socket.socket:
    """On all interfaces: which of them followers use, only they know. The token keeps strangers out."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=1024)


def _ended(error: BaseException) -> HetnodeError:
    return HetnodeError(
        ErrorCode.RANK_FAILED,
        f"The leader of this peer has ended: {cause_of(error)}",
        "See its log. Start all hosts again: the peer continues from its checkpoint.",
    )
