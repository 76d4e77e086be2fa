"""What leader and followers of a peer on several hosts tell each other before the worker calls begin.

The follower connects and sends a greeting. The leader answers at once with a welcome or an error; and later,
once it needs the follower's worker, with a summons, or at its end with a farewell or an error.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass

from node.ipc.channel import Header, StreamChannel
from node.ipc.worker_calls import AUTO_DEVICE, ListDevices
from node.ipc.worker_client import WorkerClient
from protocol.errors import ErrorCode, HetnodeError
from protocol.server.version import program_version
from protocol.types import PROTOCOL_VERSION
from protocol.wire.record_codec import Bounds, RecordCodec

MOST_BYTES = 1 << 16
WELCOME, SUMMONS, FAREWELL = (Header(0, say) for say in ("welcome", "summons", "farewell"))


@dataclass(frozen=True)
class LeaderNote:
    """Where the leader listens, and the token that its followers show."""

    port: int
    token: str


@dataclass(frozen=True)
class Greeting:
    """A follower.

    Attributes:
        host: the name of its machine, for people.
        device: as torch calls it.
        choices: the options that the leader decides for all, as text by name.
    """

    token: str
    version: str
    rank: int
    size: int
    host: str
    device: str
    choices: Mapping[str, str]


NOTE = RecordCodec[LeaderNote](LeaderNote, Bounds(MOST_BYTES))
GREETING = RecordCodec[Greeting](Greeting, Bounds(MOST_BYTES))


def own_version() -> str:
    return f"{program_version()}, protocol {PROTOCOL_VERSION}"


def refusal(greeting: Greeting, size: int, choices: Mapping[str, str]) -> HetnodeError | None:
    """Why the leader of `size` ranks, started with `choices`, cannot work with this follower."""
    who = f"Rank {greeting.rank} on {greeting.host}"
    if greeting.version != own_version():
        return HetnodeError(
            ErrorCode.VERSION_MISMATCH,
            f"{who} runs hetnode {greeting.version}; the leader of this peer runs {own_version()}.",
            "Install the same version on all hosts of the peer.",
        )
    if greeting.size != size or not 0 < greeting.rank < size:
        return HetnodeError(
            ErrorCode.BAD_OPTION,
            f"{who} was started as one of {greeting.size} processes, the leader of this peer as one of "
            f"{size}.",
            "Give torchrun the same numbers of nodes and processes on all hosts.",
        )
    for name in sorted({*choices, *greeting.choices}):
        theirs, ours = greeting.choices.get(name), choices.get(name)
        if theirs != ours:
            return HetnodeError(
                ErrorCode.BAD_OPTION,
                f"{who} was started with another {name} than the leader of this peer: {theirs}, not {ours}.",
                "Give 'hetnode join' the same options on all hosts of the peer.",
            )
    return None


async def device_of(worker: StreamChannel, wanted: str, local_rank: int) -> str:
    """The device of a rank: `wanted`; in place of AUTO_DEVICE the GPU with its local rank, or the CPU.

    Raises HetnodeError DEVICE_UNAVAILABLE, WORKER_DIED.
    """
    if wanted != AUTO_DEVICE:
        return wanted
    names = await WorkerClient(worker).call(ListDevices())
    if not names:
        return "cpu"
    if local_rank < len(names):
        return names[local_rank]
    raise HetnodeError(
        ErrorCode.DEVICE_UNAVAILABLE,
        f"There is no GPU for local rank {local_rank}: torch finds {len(names)} on {socket.gethostname()}.",
        "Start at most as many processes on a host as it has GPUs; or name the device of all with --device.",
    )


def keep_alive(connection: socket.socket) -> None:
    """Let a connection end within a minute where the other host has vanished."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 4)):
        if (number := getattr(socket, name, None)) is not None:
            connection.setsockopt(socket.IPPROTO_TCP, number, value)
