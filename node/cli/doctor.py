"""``hetnode doctor``: is this machine fit for a run? It looks, measures, and says what to do."""

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
from typing import Annotated

import typer
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from platformdirs import user_config_path, user_data_path
from rich.console import Console
from rich.table import Table
from rich.text import Text

from coordinator.placement.cost_model import memory_needed, stage_parameters
from node import command_runner
from node.cli import known_runs
from node.ipc.channel import start_child
from node.ipc.worker_calls import CheckDevice, ComputeOptions
from node.ipc.worker_client import WorkerClient
from node.measure import hardware
from node.measure.measure import MOST_NEIGHBOURS, in_words, tokens_per_second, training_speed, way_in_words
from node.net.coordinator_channel import CoordinatorChannel, fetch_status
from node.net.probe import probe_peer
from node.security import credentials
from node.security.credentials import Credentials
from node.views import run_history
from protocol.errors import ErrorCode, ExitCode, HetnodeError
from protocol.spec.resolve import resolve
from protocol.spec.run import RunSpec
from protocol.status import RunStatus
from protocol.trust.invite import Invite, is_invite
from protocol.trust.tls import certified_peer, pin_of
from protocol.types import Capacity, PeerId, StageRange

_CLOSE_SECONDS = 3.0
_REACH_SECONDS = 5.0
_CLOCK_SECONDS = 2.0
_SLOW_UPLINK = 1e6 / 8
_LEAST_DISK = 1 << 30
_DISK_PER_PARAMETER = 40  # two checkpoints, with moments and error feedback, and payloads


class Verdict(StrEnum):
    OK = "OK"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """One row: what was looked at, what was found, and what to do about it.

    `code` is that of a problem.
    """

    subject: str
    verdict: Verdict
    found: str
    remedy: str = ""
    code: ErrorCode | None = None


@dataclass(frozen=True)
class Examination:
    """What to examine: this machine as a node that is started with the same options would find it."""

    device: str
    threads: int
    host: str
    port: int
    advertise: str | None
    preset: str | None


def doctor(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="INVITE|RUN",
            help="The run that this machine shall take part in. An invite is not spent.",
        ),
    ] = None,
    invite_file: Annotated[
        Path | None, typer.Option(help="File that holds the invite, '-' for standard input.")
    ] = None,
    device: Annotated[str, typer.Option(help="Torch device, such as cpu, cuda or cuda:1.")] = "cpu",
    threads: Annotated[int, typer.Option(help="CPU threads to compute with; 0 takes all.", min=0)] = 0,
    listen: Annotated[
        str, typer.Option(help="HOST:PORT on which neighbours shall reach this node.")
    ] = "0.0.0.0:0",
    advertise: Annotated[str | None, typer.Option(help="Host that neighbours shall be told.")] = None,
    preset: Annotated[
        str | None, typer.Option(help="Measure computing with this model, where no run is given.")
    ] = None,
) -> None:
    """Check and measure this machine: device, memory, disk, clock, connections and speed, with a remedy each.

    With the name of a run that this machine was let into it also measures the way to the coordinator and to
    neighbours, and says which stages fit. It joins nothing. Exit status 0, or that of the first problem.
    """
    command_runner.configure_logging()
    host, port = command_runner.split_address(listen, "--listen")
    wanted = Examination(device, threads or hardware.available_threads(), host, port, advertise, preset)
    findings = command_runner.run(examine(wanted, run, invite_file))
    Console().print(findings_view(findings))
    problem = next((finding for finding in findings if finding.verdict is Verdict.PROBLEM), None)
    if problem is not None:
        raise typer.Exit(int(problem.code.exit_code if problem.code else ExitCode.INTERNAL))


def findings_view(findings: list[Finding]) -> Table:
    colours = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.PROBLEM: "bold red"}
    table = Table("", "", "found", "what to do", title="hetnode doctor")
    for each in findings:
        verdict = Text(each.verdict, colours[each.verdict])
        table.add_row(verdict, each.subject, Text(each.found), Text(each.remedy))
    return table


async def examine(wanted: Examination, text: str | None, invite_file: Path | None) -> list[Finding]:
    """All findings, in the order in which they are shown. Raises HetnodeError for a run that is none."""
    findings = [listening(wanted)]
    if text is None and invite_file is None:
        spec = resolve(wanted.preset)
        findings += (await computing(wanted, spec, _folder_of(None)))[1]
        findings.append(disk(spec))
        findings.append(
            Finding("run", Verdict.OK, "none was named", "Type 'hetnode doctor RUN' for one that you are in.")
        )
        return findings
    invite, known = _known(text, invite_file)
    if known is None:
        assert invite is not None, "a run without credentials is refused before"
        findings += await reachable(invite)
        findings += (await computing(wanted, resolve(wanted.preset), _folder_of(None)))[1]
        return findings
    address, tls = known
    me = _peer_of(tls)
    findings.append(certificate(tls))
    try:
        status, seen = await _status(address, tls)
    except HetnodeError as error:
        findings.append(problem("coordinator", error))
        findings += (await computing(wanted, resolve(wanted.preset), _folder_of(me)))[1]
        return findings
    spec = status.spec
    findings += seen
    findings += await ways(address, tls, me, status)
    capacity, computed = await computing(wanted, spec, _folder_of(me))
    findings += [*computed, disk(spec)]
    if capacity is not None:
        findings.append(fitting(spec, capacity))
    return findings


# This machine


def listening(wanted: Examination) -> Finding:
    """Whether a node could listen, and what is known of whether others reach it there."""
    try:
        family = socket.AF_INET6 if ":" in wanted.host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((wanted.host.strip("[]"), wanted.port))
    except OSError as error:
        return Finding(
            "listening",
            Verdict.PROBLEM,
            f"{wanted.host}:{wanted.port} cannot be listened on: {error.strerror or error}",
            "Give another --listen HOST:PORT; a node that runs already holds its own.",
            ErrorCode.PORT_IN_USE,
        )
    told = wanted.advertise or (wanted.host if wanted.host not in ("0.0.0.0", "::", "[::]") else "")
    port = f"port {wanted.port}" if wanted.port else "a free port, another one each time"
    if told and not _is_private(told) and wanted.port:
        return Finding("listening", Verdict.OK, f"{port}; others are told {told}, which no one has tried yet")
    why = f"the address {told} is a private one" if told else "which address others reach is not known"
    return Finding(
        "listening",
        Verdict.WARNING,
        f"{port}; {why}",
        "If there is a router in between, forward the port and give --listen and --advertise, or join with "
        "--dial-only. Neighbours in the same network need neither.",
    )


async def computing(
    wanted: Examination, spec: RunSpec, folder: Path
) -> tuple[Capacity | None, list[Finding]]:
    """Device, memory and speed, as a node's worker process finds them."""
    environment = {"HETNODE_THREADS": str(wanted.threads), "OMP_NUM_THREADS": str(wanted.threads)}
    async with AsyncExitStack() as stack:
        child = await start_child(
            "node.worker.worker", name="worker", died=ErrorCode.WORKER_DIED, environment=environment
        )
        stack.push_async_callback(child.close, _CLOSE_SECONDS)
        worker = WorkerClient(child)
        try:
            free_bytes = await worker.call(CheckDevice(ComputeOptions(wanted.device)))
        except HetnodeError as error:
            return None, [problem("device", error)]
        capacity = hardware.measure_capacity(wanted.device, wanted.threads)
        if free_bytes:
            capacity = replace(capacity, memory_bytes=free_bytes)
        findings = [
            Finding(
                "device",
                Verdict.OK,
                f"{in_words(capacity)}, {wanted.threads} CPU threads",
            )
        ]
        try:
            flops = await training_speed(worker, spec, wanted.device, wanted.threads, folder)
        except HetnodeError as error:
            return capacity, [*findings, problem("speed", error)]
    stage = min(1, spec.swarm.stages - 1)
    tokens = tokens_per_second(spec, stage, flops)
    found = (
        f"{flops / 1e9:,.1f} GFLOP/s in training, {tokens:,.0f} tokens/s of stage {stage} of {spec.preset}"
    )
    return replace(capacity, flops=flops), [*findings, Finding("speed", Verdict.OK, found)]


def disk(spec: RunSpec) -> Finding:
    """Room for the checkpoints of the largest stage."""
    folder = user_data_path("hetnode")
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    largest = max(stage_parameters(spec, stage) for stage in range(spec.swarm.stages))
    kept = _DISK_PER_PARAMETER * largest
    found = f"{run_history.size(free)} free at {folder}, one stage of {spec.preset} takes {run_history.size(kept)}"
    if free >= max(_LEAST_DISK, kept):
        return Finding("disk", Verdict.OK, found)
    return Finding("disk", Verdict.WARNING, found, "Free some, or give join another --folder.")


def fitting(spec: RunSpec, capacity: Capacity) -> Finding:
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
            Verdict.PROBLEM,
            f"no stage fits into {room / 2**30:.1f} GiB, the smallest takes {least / 2**30:.1f} GiB",
            "Free memory, take another --device, or ask the operator for a run of more stages.",
            ErrorCode.DEVICE_UNAVAILABLE,
        )
    if len(fits) == len(ranges):
        return Finding("fit", Verdict.OK, f"all {stages} stages fit: '--role replica' is possible, too")
    widest = [each for each in fits if not any(_holds(other, each) for other in fits if other != each)]
    words = ", ".join(f"stages {each}" if len(each) > 1 else f"stage {each}" for each in widest)
    return Finding("fit", Verdict.OK, f"what fits at most: {words}, of {stages} stages")


def _holds(outer: StageRange, inner: StageRange) -> bool:
    return outer.first <= inner.first and inner.stop <= outer.stop


# The run


def certificate(tls: Credentials) -> Finding:
    left = tls.expires - time.time()
    if left > 0:
        return Finding("certificate", Verdict.OK, f"good for {left / 3600:.1f} h; a node renews it")
    return Finding(
        "certificate",
        Verdict.PROBLEM,
        f"it ended {-left / 3600:.1f} h ago",
        "Ask the run's operator for an invite and type 'hetnode join INVITE'.",
        ErrorCode.CERTIFICATE_REFUSED,
    )


async def reachable(invite: Invite) -> list[Finding]:
    """Whether anything listens where the invite says; it is not spent."""
    findings = []
    for name, address in (("coordinator", invite.api), ("enrolment", invite.enrolment)):
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
            findings.append(Finding(name, Verdict.OK, found))
        except (OSError, TimeoutError) as error:
            findings.append(
                Finding(
                    name,
                    Verdict.PROBLEM,
                    f"nothing answers at {address}: {str(error) or 'no answer in time'}",
                    "Check that the coordinator runs, and that no firewall stands in between.",
                    ErrorCode.COORDINATOR_UNREACHABLE,
                )
            )
    findings.append(
        Finding(
            "connections",
            Verdict.OK,
            "not measured: that takes a certificate, for which the invite would be spent",
            "'hetnode join INVITE' measures them; afterwards 'hetnode doctor RUN' does so at any time.",
        )
    )
    return findings


async def _status(address: str, tls: Credentials) -> tuple[RunStatus, list[Finding]]:
    """What the coordinator says, and what that shows. Raises HetnodeError where it cannot be asked."""
    asked = time.time()
    status = await fetch_status(address, tls)
    offset = status.time - (asked + time.time()) / 2
    findings = [
        Finding("coordinator", Verdict.OK, f"run {status.spec.run_id} at {address}: {status.message}")
    ]
    words = f"{abs(offset):.1f} s {'behind' if offset > 0 else 'ahead of'} the coordinator's"
    if abs(offset) <= _CLOCK_SECONDS:
        return status, [*findings, Finding("clock", Verdict.OK, words)]
    remedy = "A node allows for it, certificates do not for more than an hour: set the clock."
    return status, [*findings, Finding("clock", Verdict.WARNING, words, remedy)]


async def ways(address: str, tls: Credentials, me: str, status: RunStatus) -> list[Finding]:
    """To the coordinator, and to those with an endpoint in the newest plan."""
    findings = []
    try:
        async with CoordinatorChannel(address, tls) as channel, channel.probe() as probe:
            figures = await probe.figures()
        slow = min(figures.uplink, figures.downlink) < _SLOW_UPLINK
        findings.append(
            Finding(
                "connection",
                Verdict.WARNING if slow else Verdict.OK,
                way_in_words(figures),
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
            words = f"{round_trip * 1000:.1f} ms there and back, at {member.endpoint}"
            findings.append(Finding(name, Verdict.OK, words))
    return findings


def problem(subject: str, error: HetnodeError) -> Finding:
    return Finding(subject, Verdict.PROBLEM, error.cause, error.remedy, error.code)


def unmeasured(subject: str, error: HetnodeError) -> Finding:
    return Finding(subject, Verdict.WARNING, error.cause, error.remedy)


def _known(
    text: str | None, invite_file: Path | None
) -> tuple[Invite | None, tuple[str, Credentials] | None]:
    """The invite, if there is one; address and credentials for its run, or for the one named, if kept here.

    Raises HetnodeError: NO_CREDENTIALS for the name of a run without any; as known_runs.destination does.
    """
    wanted = None
    if invite_file is not None or (text is not None and is_invite(text)):
        wanted = known_runs.destination(text, invite_file).invite
    if wanted is None:
        return None, known_runs.operator_or_member(text)
    for folder in sorted(user_config_path("hetnode").glob("peer-*.runs/*")):
        if credentials.exist(folder):
            kept = credentials.load(folder)
            authority = x509.load_pem_x509_certificate(kept.tls.authority)
            if pin_of(authority) == wanted.pin:
                return wanted, (wanted.api, kept.tls)
    return wanted, None


def _peer_of(tls: Credentials) -> str:
    """The peer whose credentials these are, "" for the operator's."""
    certificate = x509.load_pem_x509_certificate(tls.certificate)
    try:
        authority = x509.load_pem_x509_certificate(tls.authority)
        return certified_peer(certificate.public_bytes(Encoding.DER), authority).peer
    except ValueError:
        return ""


def _folder_of(me: str | None) -> Path:
    """Where the measured speed is kept: the folder of that node."""
    return user_data_path("hetnode") / "nodes" / PeerId(me) if me else user_data_path("hetnode")


def _is_private(host: str) -> bool:
    """Whether `host` is an address that only its own network knows; a name may be anything."""
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return address.is_private or address.is_loopback
