"""The devices of a peer, and the start of a worker process for each of them."""

from __future__ import annotations

import asyncio
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Protocol

from node.ipc.channel import Child, StreamChannel, start_child
from node.ipc.modules import WORKER
from node.ipc.rank_channels import RankChannels
from node.ipc.worker_calls import FormGroup, ListDevices
from node.ipc.worker_client import WorkerClient
from protocol.errors import ErrorCode, HetnodeError

_LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
# The ranks of one machine meet on its loopback interface: no other machine reaches them.
_LOOPBACK_ALONE = {"GLOO_SOCKET_IFNAME": _LOOPBACK, "NCCL_SOCKET_IFNAME": _LOOPBACK}
_CLOSE_SECONDS = 3.0
_MOST_RANKS = 64


class Workers(Protocol):
    """Where a node computes: in one process, or in several that answer as one worker."""

    @property
    def sharded(self) -> bool | None:
        """Whether the parameters are sharded over the processes; None: if they do not fit one device."""

    async def start(self, threads: int, processes: AsyncExitStack) -> WorkerClient:
        """The worker, which `processes` ends. Its processes share `threads` of the CPU.

        Raises HetnodeError DEVICE_UNAVAILABLE if a device does not exist, WORKER_DIED, RANK_FAILED.
        """


@dataclass(frozen=True)
class OneWorker:
    """One process, as :class:`Workers`."""

    sharded: bool | None = None

    async def start(self, threads: int, processes: AsyncExitStack) -> WorkerClient:
        return WorkerClient(await start_worker("worker", threads, processes))


@dataclass(frozen=True)
class DeviceList:
    """The devices that a peer computes on, one rank each, as :class:`Workers`.

    Attributes:
        names: as torch calls them. Empty: all GPUs of this machine.
        sharded: whether the parameters are sharded over them; None: if they do not fit one.
    """

    names: tuple[str, ...] = ()
    sharded: bool | None = None

    async def start(self, threads: int, processes: AsyncExitStack) -> WorkerClient:
        with _listening_socket() as listener:
            names = self.names or await _all_devices(threads)
            share = max(1, threads // len(names))
            ranks = []
            for rank in range(len(names)):
                inherited = () if rank else (listener.fileno(),)
                name = f"worker of rank {rank}"
                ranks.append(await start_worker(name, share, processes, _LOOPBACK_ALONE, inherited))
            host, port = listener.getsockname()
            calls = [
                FormGroup(rank, len(names), name, host, port, None if rank else listener.fileno())
                for rank, name in enumerate(names)
            ]
            await form(ranks, calls)
        return WorkerClient(RankChannels(ranks), len(ranks))


def names_several(device: str) -> bool:
    """Whether ``--device`` names several devices rather than one, as :func:`parse_devices` reads them."""
    return "," in device or re.fullmatch(r"all|cpu:[0-9]+", device.strip()) is not None


def one_device(device: str) -> str:
    """What torch calls the device that ``--device`` names; a number alone is that of a GPU."""
    return f"cuda:{device.strip()}" if re.fullmatch(r"[0-9]{1,3}", device.strip()) else device


def parse_devices(text: str) -> DeviceList:
    """What ``--device`` says of several devices: ``all``; numbers or names, such as ``0,1`` or
    ``cuda:0,cuda:1``; or ``cpu:N``, N ranks on the CPU, which share its threads.

    Raises HetnodeError BAD_OPTION.
    """
    if text.strip() == "all":
        return DeviceList()
    if (cpu := re.fullmatch(r"cpu:([0-9]{1,2})", text.strip())) and 0 < int(cpu[1]) <= _MOST_RANKS:
        return DeviceList(("cpu",) * int(cpu[1]))
    names = tuple(f"cuda:{each}" if each.isdigit() else each for each in map(str.strip, text.split(",")))
    if not all(re.fullmatch(r"cuda:[0-9]{1,3}", name) for name in names) or len({*names}) < len(names):
        raise HetnodeError(
            ErrorCode.BAD_OPTION,
            f"--device '{text}' is not a list of different GPUs.",
            "Give --device all, numbers of GPUs such as 0,1,2,3, or cpu:N for N processes on the CPU.",
        )
    return DeviceList(names)


async def start_worker(
    name: str,
    threads: int,
    processes: AsyncExitStack,
    environment: Mapping[str, str] | None = None,
    descriptors: Sequence[int] = (),
) -> Child:
    """A worker process, which `processes` ends.

    Without an `environment` its interfaces for gloo and NCCL are the user's choice.
    """
    child = await start_child(
        WORKER,
        name=name,
        died=ErrorCode.WORKER_DIED,
        environment={
            "HETNODE_THREADS": str(threads),
            "OMP_NUM_THREADS": str(threads),
            **(environment or {}),
        },
        descriptors=descriptors,
    )
    processes.push_async_callback(child.close, _CLOSE_SECONDS)
    return child


async def form(ranks: Sequence[StreamChannel], calls: Sequence[FormGroup]) -> None:
    """Let the ranks meet, each with its call. The first failure is raised, while others may still wait."""
    try:
        async with asyncio.TaskGroup() as group:
            for rank, call in zip(ranks, calls, strict=True):
                group.create_task(WorkerClient(rank).call(call))
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None


async def _all_devices(threads: int) -> tuple[str, ...]:
    async with AsyncExitStack() as stack:
        names = await WorkerClient(await start_worker("worker", threads, stack)).call(ListDevices())
    if not names:
        raise HetnodeError(
            ErrorCode.DEVICE_UNAVAILABLE,
            "--device all: torch finds no GPU on this machine.",
            "Check the driver and the installed torch build; --device cpu:N takes N processes on the CPU.",
        )
    return names


def _listening_socket() -> socket.socket:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(128)
    return listener
