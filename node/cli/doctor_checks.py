"""The checks of ``hetnode doctor``: each looks at one thing and says what to do about it."""

from __future__ import annotations

import asyncio
import ipaddress
import shutil
import socket
import time
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from platformdirs import user_data_path

from coordinator.placement.cost_model import memory_needed, stage_parameters
from node import command_runner
from node.ipc.channel import start_child
from node.ipc.worker_calls import CheckDevice, ComputeOptions
from node.ipc.worker_client import WorkerClient
from node.measure import hardware
from node.measure.measure import (
    MOST_NEIGHBOURS,
    describe_capacity,
    describe_connection,
    tokens_per_second,
    training_speed,
)
from node.net.coordinator_channel import CoordinatorChannel, fetch_status
from node.net.probe import probe_peer
from node.security.credentials import Credentials
from node.views import run_history
from protocol.errors import ErrorCode, HetnodeError
from protocol.spec.run import RunSpec
from protocol.status import RunStatus
from protocol.trust.invite import Invite
from protocol.types import Capacity, StageRange

_CLOSE_SECONDS = 3.0
_REACH_SECONDS = 5.0
_CLOCK_SECONDS = 2.0
_SLOW_UPLINK = 1e6 / 8
_LEAST_DISK = 1 << 30
_DISK_PER_PARAMETER = 40  # two checkpoints, with moments and error feedback, and payloads


class Severity(StrEnum):
    OK = "OK"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """One row: what was looked at, what was found, and what to do about it.

    `code` is that of a problem.
    """

    subject: str
    severity: Severity
    found: str
    remedy: str = ""
    code: ErrorCode | None = None


@dataclass(frozen=True)
class NodeSettings:
    """What to examine: this machine as a node that is started with the same options would find it."""

    device: str
    threads: int
    host: str
    port: int
    advertise: str | None
    preset: str | None


def check_listening(settings: NodeSettings) -> Finding:
    """Whether a node could listen, and what is known of whether others reach it there."""
    try:
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((settings.host.strip("[]"), settings.port))
    except OSError as error:
        return Finding(
            "listening",
            Severity.PROBLEM,
            f"{settings.host}:{settings.port} cannot be listened on: {error.strerror or error}",
            "Give another --listen HOST:PORT; a node that runs already holds its own.",
            ErrorCode.PORT_IN_USE,
        )
    told = settings.advertise or (settings.host if settings.host not in ("0.0.0.0", "::", "[::]") else "")
    port = f"port {settings.port}" if settings.port else "a free port, another one each time"
    if told and not _is_private(told) and settings.port:
        return Finding(
            "listening", Severity.OK, f"{port}; others are told {told}, which no one has tried yet"
        )
    why = f"the address {told} is a private one" if told else "which address others reach is not known"
    return Finding(
        "listening",
        Severity.WARNING,
        f"{port}; {why}",
        "If there is a router in between, forward the port and give --listen and --advertise, or join with "
        "--dial-only. Neighbours in the same network need neither.",
    )


async def check_compute(
    settings: NodeSettings, spec: RunSpec, folder: Path
) -> tuple[Capacity | None, list[Finding]]:
    """Device, memory and speed, as a node's worker process finds them."""
    environment = {"HETNODE_THREADS": str(settings.threads), "OMP_NUM_THREADS": str(settings.threads)}
    async with AsyncExitStack() as stack:
        child = await start_child(
            "node.worker.worker", name="worker", died=ErrorCode.WORKER_DIED, environment=environment
        )
        stack.push_async_callback(child.close, _CLOSE_SECONDS)
        worker = WorkerClient(child)
        try:
            free_bytes = await worker.call(CheckDevice(ComputeOptions(settings.device)))
        except HetnodeError as error:
            return None, [problem("device", error)]
        capacity = hardware.measure_capacity(settings.device, settings.threads)
        if free_bytes:
            capacity = replace(capacity, memory_bytes=free_bytes)
        findings = [
            Finding(
                "device",
                Severity.OK,
                f"{describe_capacity(capacity)}, {settings.threads} CPU threads",
            )
        ]
        try:
            flops = await training_speed(worker, spec, settings.device, settings.threads, folder)
        except HetnodeError as error:
            return capacity, [*findings, problem("speed", error)]
    stage = min(1, spec.swarm.stages - 1)
    tokens = tokens_per_second(spec, stage, flops)
    found = (
        f"{flops / 1e9:,.1f} GFLOP/s in training, {tokens:,.0f} tokens/s of stage {stage} of {spec.preset}"
    )
    return replace(capacity, flops=flops), [*findings, Finding("speed", Severity.OK, found)]


def check_disk(spec: RunSpec) -> Finding:
    """Room for the checkpoints of the largest stage."""
    folder = user_data_path("hetnode")
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    largest = max(stage_parameters(spec, stage) for stage in range(spec.swarm.stages))
    kept = _DISK_PER_PARAMETER * largest
    sizes = (run_history.size(free), run_history.size(kept))
    found = f"{sizes[0]} free at {folder}, one stage of {spec.preset} takes {sizes[1]}"
    if free >= max(_LEAST_DISK, kept):
        return Finding("disk", Severity.OK, found)
    return Finding("disk", Severity.WARNING, found, "Free some, or give join another --folder.")


def check_memory(spec: RunSpec, capacity: Capacity) -> Finding:
    """Which stage ranges this machine has memory for."""
    stages = spec.swarm.stages
    room = capacity.memory_bytes * (1 - spec.grouping.reserve)
    ranges = [StageRange(first, stop) for first in range(stages) for stop in range(first + 1, stages + 1)]
    fits = [
        each
        for each in ranges
        # The members that may follow hold as many microbatches in flight.
        if memory_needed(spec, each, stages - each.stop + 1, capacity.device) <= room
    ]
    least = min(memory_needed(spec, each, stages - each.stop + 1, capacity.device) for each in ranges)
    if not fits:
        return Finding(
            "fit",
            Severity.PROBLEM,
            f"no stage fits into {room / 2**30:.1f} GiB, the smallest takes {least / 2**30:.1f} GiB",
            "Free memory, take another --device, or ask the operator for a run of more stages.",
            ErrorCode.DEVICE_UNAVAILABLE,
        )
    if len(fits) == len(ranges):
        return Finding("fit", Severity.OK, f"all {stages} stages fit: '--role replica' is possible, too")
    widest = [each for each in fits if not any(_holds(other, each) for other in fits if other != each)]
    text = ", ".join(f"stages {each}" if len(each) > 1 else f"stage {each}" for each in widest)
    return Finding("fit", Severity.OK, f"what fits at most: {text}, of {stages} stages")


def _holds(outer: StageRange, inner: StageRange) -> bool:
    return outer.first <= inner.first and inner.stop <= outer.stop


def check_certificate(tls: Credentials) -> Finding:
    left = tls.expires - time.time()
    if left > 0:
        return Finding("certificate", Severity.OK, f"good for {left / 3600:.1f} h; a node renews it")
    return Finding(
        "certificate",
        Severity.PROBLEM,
        f"it ended {-left / 3600:.1f} h ago",
        "Ask the run's operator for an invite and type 'hetnode join INVITE'.",
        ErrorCode.CERTIFICATE_REFUSED,
    )


async def check_reachable(invite: Invite) -> list[Finding]:
    """Whether anything listens where the invite says; it is not spent."""
    findings = []
    for name, address in (("coordinator", invite.api), ("enrollment", invite.enrollment)):
        host, port = command_runner.split_address(address, "The invite's address")
        try:
            began = time.perf_counter()
            async with asyncio.timeout(_REACH_SECONDS):
                _, writer = await asyncio.open_connection(host.strip("[]"), port)
            seconds = time.perf_counter() - began
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
            found = f"something listens at {address}, {seconds * 1000:.0f} ms away"
            findings.append(Finding(name, Severity.OK, found))
        except (OSError, TimeoutError) as error:
            findings.append(
                Finding(
                    name,
                    Severity.PROBLEM,
                    f"nothing answers at {address}: {str(error) or 'no answer in time'}",
                    "Check that the coordinator runs, and that no firewall stands in between.",
                    ErrorCode.COORDINATOR_UNREACHABLE,
                )
            )
    findings.append(
        Finding(
            "connections",
            Severity.OK,
            "not measured: that takes a certificate, for which the invite would be spent",
            "'hetnode join INVITE' measures them; afterwards 'hetnode doctor RUN' does so at any time.",
        )
    )
    return findings


async def check_coordinator(address: str, tls: Credentials) -> tuple[RunStatus, list[Finding]]:
    """What the coordinator says, and what that shows. Raises HetnodeError where it cannot be asked."""
    asked = time.time()
    status = await fetch_status(address, tls)
    offset = status.time - (asked + time.time()) / 2
    findings = [
        Finding("coordinator", Severity.OK, f"run {status.spec.run_id} at {address}: {status.message}")
    ]
    text = f"{abs(offset):.1f} s {'behind' if offset > 0 else 'ahead of'} the coordinator's"
    if abs(offset) <= _CLOCK_SECONDS:
        return status, [*findings, Finding("clock", Severity.OK, text)]
    remedy = "A node allows for it, certificates do not for more than an hour: set the clock."
    return status, [*findings, Finding("clock", Severity.WARNING, text, remedy)]


async def check_connections(address: str, tls: Credentials, me: str, status: RunStatus) -> list[Finding]:
    """To the coordinator, and to those with an endpoint in the newest plan."""
    findings = []
    try:
        async with CoordinatorChannel(address, tls) as channel, channel.probe() as probe:
            figures = await probe.figures()
        slow = min(figures.uplink, figures.downlink) < _SLOW_UPLINK
        findings.append(
            Finding(
                "connection",
                Severity.WARNING if slow else Severity.OK,
                describe_connection(figures),
                "It is slow for a run; use a cable, or stop what else uses it." if slow else "",
            )
        )
    except HetnodeError as error:
        findings.append(unmeasured("connection", error))
    if not me:
        return findings
    replicas = status.plan.replicas if status.plan is not None else ()
    members = [each for replica in replicas for each in replica.members if each.endpoint and each.peer != me]
    for member in members[:MOST_NEIGHBOURS]:
        name = f"neighbour {member.peer[-8:]}"
        try:
            async with probe_peer(member.endpoint, member.peer, tls) as probe:
                round_trip = await probe.round_trip()  # no more, as it trains
        except HetnodeError as error:
            findings.append(unmeasured(name, error))
        else:
            text = f"{round_trip * 1000:.1f} ms there and back, at {member.endpoint}"
            findings.append(Finding(name, Severity.OK, text))
    return findings


def problem(subject: str, error: HetnodeError) -> Finding:
    return Finding(subject, Severity.PROBLEM, error.cause, error.remedy, error.code)


def unmeasured(subject: str, error: HetnodeError) -> Finding:
    return Finding(subject, Severity.WARNING, error.cause, error.remedy)


def _is_private(host: str) -> bool:
    """Whether `host` is an address that only its own network knows; a name may be anything."""
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return address.is_private or address.is_loopback
