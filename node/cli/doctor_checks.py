"""The checks of ``hetnode doctor``: each looks at one thing and says what to do about it."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import shutil
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from platformdirs import user_config_path, user_data_path

from coordinator.placement.cost_model import memory_needed
from coordinator.status.cause_text import status_text
from node import command_runner
from node.extras import require_for_data
from node.ipc.channel import start_child
from node.ipc.modules import WORKER
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
from node.net.enrollment import clock_ahead
from node.net.probe import probe_peer
from node.security.credentials import Credentials
from node.views import run_history
from protocol.errors import ErrorCode, HetnodeError
from protocol.memory.needs import MemoryPolicy, MemoryRoom, choose, members_left
from protocol.server.clock import off_text
from protocol.server.descriptors import MORE_DESCRIPTORS, few_descriptors, raise_descriptor_limit
from protocol.server.gateway import listen_on
from protocol.spec.fixed import MEMORY_RESERVE
from protocol.spec.run import RunSpec
from protocol.status import RunStatus
from protocol.trust.host_port import host_port
from protocol.trust.invite import Invite
from protocol.types import Capacity, StageRange

_CLOSE_SECONDS = 3.0
_REACH_SECONDS = 5.0
_CLOCK_SECONDS = 2.0
_SET_CLOCK = "A node allows for it, certificates do not for more than an hour: set the clock."
_SLOW_UPLINK = 1e6 / 8
_LEAST_DISK = 1 << 30
_DISK_PER_PARAMETER = 40  # two checkpoints, with moments and error feedback, and payloads


class Severity(StrEnum):
    OK = "OK"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True)
class CheckResult:
    """One row: what was looked at, what was found, and what to do about it.

    `code` is that of a problem.
    """

    subject: str
    severity: Severity
    found: str
    remedy: str = ""
    code: ErrorCode | None = None


def ok(subject: str, found: str, remedy: str = "") -> CheckResult:
    return CheckResult(subject, Severity.OK, found, remedy)


def warning(subject: str, found: str, remedy: str) -> CheckResult:
    return CheckResult(subject, Severity.WARNING, found, remedy)


def problem(subject: str, error: HetnodeError) -> CheckResult:
    return CheckResult(subject, Severity.PROBLEM, error.cause, error.remedy, error.code)


@dataclass(frozen=True)
class NodeSettings:
    """What to examine: this machine as a node that is started with the same options would find it."""

    device: str
    threads: int
    host: str
    port: int
    advertise: str | None
    preset: str | None
    dht_port: int = 0


def check_listening(settings: NodeSettings) -> CheckResult:
    """Whether a node could listen, and what is known of whether others reach it there."""
    try:
        listen_on(settings.host, settings.port).close()
    except OSError as error:
        return CheckResult(
            "listening",
            Severity.PROBLEM,
            f"{host_port(settings.host, settings.port)} cannot be listened on: {error.strerror or error}",
            "Give another --listen HOST:PORT; a node that runs already holds its own.",
            ErrorCode.PORT_IN_USE,
        )
    told = settings.advertise or (settings.host if settings.host not in ("0.0.0.0", "::") else "")
    port = f"port {settings.port}" if settings.port else "a free port, another one each time"
    if told and not _is_private(told) and settings.port:
        return ok("listening", f"{port}; others are told {told}, which no one has tried yet")
    why = f"the address {told} is a private one" if told else "which address others reach is not known"
    return warning(
        "listening",
        f"{port}; {why}",
        "If there is a router in between, forward the port and give --listen and --advertise, or join with "
        "--listen none. Neighbours in the same network need neither.",
    )


def check_descriptors() -> CheckResult:
    """How many files and connections a node may have open, after it has raised its limit as far as it can."""
    if found := few_descriptors():
        return warning("open files", found, MORE_DESCRIPTORS)
    return ok("open files", f"{raise_descriptor_limit():,} at once")


def check_proxy() -> list[CheckResult]:
    """The proxy that this machine's environment names, if there is one."""
    named = {each: urlsplit(url).hostname for each, url in getproxies().items() if each != "no"}
    found = ", ".join(sorted({host for host in named.values() if host}))
    return [ok("proxy", f"{found} for downloads from a hub; peers are dialled without it")] if found else []


async def check_compute(
    settings: NodeSettings, spec: RunSpec, folder: Path
) -> tuple[Capacity | None, list[CheckResult]]:
    """Device, memory and speed, as a node's worker process finds them."""
    environment = {"HETNODE_THREADS": str(settings.threads), "OMP_NUM_THREADS": str(settings.threads)}
    async with AsyncExitStack() as stack:
        child = await start_child(WORKER, name="worker", died=ErrorCode.WORKER_DIED, environment=environment)
        stack.push_async_callback(child.close, _CLOSE_SECONDS)
        worker = WorkerClient(child)
        try:
            used = await worker.call(CheckDevice(ComputeOptions(settings.device)))
        except HetnodeError as error:
            return None, [problem("device", error)]
        capacity = hardware.measure_capacity(used.device, settings.threads, used.free_bytes)
        described = f"{describe_capacity(capacity)}, in {used.precision}, {settings.threads} CPU threads"
        findings = [ok("device", described)]
        try:
            flops = await training_speed(worker, spec, used.device, settings.threads, folder, used.precision)
        except HetnodeError as error:
            return capacity, [*findings, problem("speed", error)]
    stage = min(1, spec.swarm.stages - 1)
    tokens = tokens_per_second(spec, stage, flops)
    found = (
        f"{flops / 1e9:,.1f} GFLOP/s in training, {tokens:,.0f} tokens/s of stage {stage} of {spec.preset}"
    )
    return replace(capacity, flops=flops), [*findings, ok("speed", found)]


def check_disk(spec: RunSpec) -> CheckResult:
    """Whether this user may write where a node keeps its key and its checkpoints, and room for the latter."""
    for place in (user_config_path("hetnode"), user_data_path("hetnode")):
        folder = next(each for each in (place, *place.parents) if each.exists())
        if not os.access(folder, os.W_OK):  # False also for root, on a disk that is mounted to be read
            remedy = "Give join a --folder and an --identity that this user may write, or another HOME."
            return CheckResult(
                "disk", Severity.PROBLEM, f"{place} cannot be written", remedy, ErrorCode.BAD_OPTION
            )
    free = shutil.disk_usage(folder).free
    largest = max(spec.parameters_of(stage) for stage in range(spec.swarm.stages))
    kept = _DISK_PER_PARAMETER * largest
    sizes = (run_history.size(free), run_history.size(kept))
    found = f"{sizes[0]} free at {folder}, one stage of {spec.preset} takes {sizes[1]}"
    if free >= max(_LEAST_DISK, kept):
        return ok("disk", found)
    return warning("disk", found, "Free some, or give join another --folder.")


def check_memory(spec: RunSpec, capacity: Capacity) -> CheckResult:
    """Which stage ranges this machine has memory for."""
    stages = spec.swarm.stages
    room = capacity.memory_bytes * (1 - MEMORY_RESERVE)
    ranges = [StageRange(first, stop) for first in range(stages) for stop in range(first + 1, stages + 1)]
    own = capacity.device, capacity.main_bytes
    needed = {each: memory_needed(spec, each, members_left(spec, each), *own) for each in ranges}
    fits = [each for each in ranges if needed[each] <= room]
    if not fits:
        least = min(needed.values())
        return CheckResult(
            "fit",
            Severity.PROBLEM,
            f"no stage fits into {room / 2**30:.1f} GiB, the smallest takes {least / 2**30:.1f} GiB",
            "Free memory, take another --device, or ask the operator for a run of more stages.",
            ErrorCode.DEVICE_UNAVAILABLE,
        )
    main = capacity.main_bytes * (1 - MEMORY_RESERVE)

    def place_of(each: StageRange) -> str:
        policy = choose(spec, each, members_left(spec, each), MemoryRoom(capacity.device, room, main))[0]
        return f", {policy}" * (policy != MemoryPolicy())

    if len(fits) == len(ranges):
        able = "this machine can be a full replica"
        return ok("fit", f"all {stages} stages fit{place_of(StageRange(0, stages))}: {able}")
    widest = [each for each in fits if not any(set(other) > set(each) for other in fits)]
    text = ", ".join(f"{each.text}{place_of(each)}" for each in widest)
    return ok("fit", f"what fits at most: {text}, of {stages} stages")


def no_single_run(runs: Sequence[str]) -> CheckResult:
    """Of a machine that is in none of `runs`, or in several."""
    if not runs:
        return ok(
            "run", "this machine is in none", "Ask an operator for an invite, then 'hetnode doctor INVITE'."
        )
    remedy = "Type 'hetnode doctor RUN' for one of them."
    return ok("run", f"this machine is in {len(runs)}: {', '.join(runs)}", remedy)


def check_certificate(tls: Credentials) -> CheckResult:
    left = tls.expires - time.time()
    if left > 0:
        return ok("certificate", f"good for {left / 3600:.1f} h; a node renews it")
    return CheckResult(
        "certificate",
        Severity.PROBLEM,
        f"it ended {-left / 3600:.1f} h ago",
        "Ask the run's operator for an invite and type 'hetnode join INVITE'.",
        ErrorCode.CERTIFICATE_REFUSED,
    )


async def check_reachable(invite: Invite) -> list[CheckResult]:
    """Whether anything listens where the invite says; it is not spent."""
    findings = []
    for name, address in (("coordinator", invite.api), ("enrollment", invite.enrollment)):
        host, port = command_runner.split_address(address, "The invite's address")
        try:
            began = time.perf_counter()
            async with asyncio.timeout(_REACH_SECONDS):
                _, writer = await asyncio.open_connection(host, port)
            seconds = time.perf_counter() - began
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
            findings.append(ok(name, f"something listens at {address}, {seconds * 1000:.0f} ms away"))
        except (OSError, TimeoutError) as error:
            silence = HetnodeError(
                ErrorCode.COORDINATOR_UNREACHABLE,
                f"nothing answers at {address}: {str(error) or 'no answer in time'}",
                "Check that the coordinator runs, and that no firewall stands in between.",
            )
            findings.append(problem(name, silence))
    with suppress(HetnodeError, OSError, TimeoutError):
        async with asyncio.timeout(_REACH_SECONDS):
            if off := off_text(await clock_ahead(invite), "at least "):
                findings.append(warning("clock", off.removeprefix(", which is "), _SET_CLOCK))
    unmeasured = ok(
        "connections",
        "not measured: that takes a certificate, for which the invite would be spent",
        "'hetnode join INVITE' measures them; afterwards 'hetnode doctor RUN' does so at any time.",
    )
    return [*findings, unmeasured]


async def check_coordinator(address: str, tls: Credentials) -> tuple[RunStatus, list[CheckResult]]:
    """What the coordinator says, and what that shows. Raises HetnodeError where it cannot be asked."""
    asked = time.time()
    status = await fetch_status(address, tls)
    offset = status.time - (asked + time.time()) / 2
    answer = ok("coordinator", f"run {status.run} at {address}: {status_text(status)}")
    text = f"{abs(offset):.1f} s {'behind' if offset > 0 else 'ahead of'} the coordinator's"
    if abs(offset) <= _CLOCK_SECONDS:
        return status, [answer, ok("clock", text)]
    return status, [answer, warning("clock", text, _SET_CLOCK)]


def check_libraries(spec: RunSpec) -> list[CheckResult]:
    """A warning if a library is missing that reads the data of the run: this machine may have other data."""
    try:
        require_for_data(spec.data)
    except HetnodeError as error:
        return [warning("data", error.cause, error.remedy)]
    return []


async def check_connections(address: str, tls: Credentials, me: str, status: RunStatus) -> list[CheckResult]:
    """To the coordinator, and to those with an endpoint in the newest plan."""
    findings = []
    try:
        async with CoordinatorChannel(address, tls) as channel, channel.probe() as probe:
            figures = await probe.figures()
        found = describe_connection(figures)
        if min(figures.uplink, figures.downlink) < _SLOW_UPLINK:
            remedy = "It is slow for a run; use a cable, or stop what else uses it."
            findings.append(warning("connection", found, remedy))
        else:
            findings.append(ok("connection", found))
    except HetnodeError as error:
        findings.append(warning("connection", error.cause, error.remedy))
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
            findings.append(warning(name, error.cause, error.remedy))
        else:
            found = f"{round_trip * 1000:.1f} ms there and back, at {member.endpoint}"
            findings.append(ok(name, found))
    return findings


def _is_private(host: str) -> bool:
    """Whether `host` is an address that only its own network knows; a name may be anything."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_private or address.is_loopback
