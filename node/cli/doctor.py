"""``hetnode doctor``: checks whether this machine can take part in a run."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from platformdirs import user_config_path, user_data_path
from rich.table import Table
from rich.text import Text

from node import command_runner
from node.cli import doctor_checks as checks
from node.cli.doctor_checks import CheckResult, NodeSettings, Severity
from node.cli.doctor_reach import check_reach, check_router, operator_finding
from node.cli.doctor_wsl import check_wsl, look
from node.cli.options import Device, option
from node.cli.output import say
from node.command_runner import TerminalConsole
from node.here import known_runs
from node.ipc.template import own_template
from node.ipc.worker_calls import AUTO_DEVICE
from node.measure import hardware
from node.security import credentials
from node.security.credentials import Credentials
from protocol.errors import ExitCode, HetnodeError
from protocol.run_files.presets import PRESETS
from protocol.run_files.resolve import resolve
from protocol.spec.run import RunSpec
from protocol.trust.invite import Invite
from protocol.trust.tls import certified_peer
from protocol.types import Capacity, PeerId


def doctor(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="INVITE|FILE|RUN|PRESET",
            help="The run that this machine shall take part in: an invite, which is not spent, the file that "
            "holds it, or the name of a run. Default: the only run that this machine is in. The name of a "
            "preset measures computing with that model, and asks no run.",
        ),
    ] = None,
    device: Device = AUTO_DEVICE,
    listen: Annotated[str, option("HOST:PORT on which neighbours shall reach this node.")] = "[::]:0",
    advertise: Annotated[str | None, option("Host that neighbours shall be told.")] = None,
    dht_port: Annotated[int, option("TCP port of this node's DHT peer; 0 takes a free one.")] = 0,
    as_json: Annotated[bool, option("Print JSON instead of a table.", "--json")] = False,
) -> None:
    """Check and measure this machine: device, memory, disk, clock, connections and speed, with a remedy each.

    In a run that this machine was let into it also measures the way to the coordinator and to neighbours,
    says which stages fit, and lets the coordinator dial this machine's ports: who reaches it, what kind of
    NAT lies in between, and which relay is nearest. It joins nothing. Exit status 0, also with warnings, or
    that of the first problem (docs/reference/errors.md).
    """
    command_runner.configure_logging()
    host, port = command_runner.split_address(listen, "--listen")
    advertise = command_runner.bare_host(advertise, "--advertise")
    preset = run if run in PRESETS else None
    settings = NodeSettings(device, hardware.available_threads(), host, port, advertise, preset, dht_port)
    findings = command_runner.run(examine(settings, None if preset else run))
    if as_json:
        say(json.dumps([asdict(finding) for finding in findings]))
    else:
        TerminalConsole().print(findings_view(findings))
    first = next((finding for finding in findings if finding.severity is Severity.PROBLEM), None)
    if first is not None:
        raise typer.Exit(int(first.code.exit_code if first.code else ExitCode.INTERNAL))


def findings_view(findings: list[CheckResult]) -> Table:
    colours = {Severity.OK: "green", Severity.WARNING: "yellow", Severity.PROBLEM: "bold red"}
    table = Table("", "", "found", "what to do", title="hetnode doctor")
    for each in findings:
        severity = Text(each.severity, colours[each.severity])
        table.add_row(severity, each.subject, Text(each.found), Text(each.remedy))
    return table


async def examine(settings: NodeSettings, text: str | None) -> list[CheckResult]:
    """All findings, in the order in which they are shown. Raises HetnodeError for a run that is none."""
    own_template()  # imports torch while the other checks run
    findings = [*check_wsl(look()), checks.check_descriptors(), *checks.check_proxy()]

    async def check_compute(spec: RunSpec, me: str = "") -> Capacity | None:
        capacity, computed = await checks.check_compute(settings, spec, _folder_of(me))
        findings.extend(computed)
        return capacity

    if text is None:
        runs = known_runs.runs_here()
        if len(runs) != 1 or settings.preset:
            spec = resolve(settings.preset)
            findings.append(checks.check_listening(settings))
            await check_compute(spec)
            return [*findings, checks.check_disk(spec), checks.no_single_run(runs)]
        (text,) = runs
    invite, known = _known(text)
    if known is None:
        assert invite is not None, "a run without credentials is refused before"
        findings += [checks.check_listening(settings), *await checks.check_reachable(invite)]
        findings += await check_router(invite.api)
        await check_compute(resolve(settings.preset))
        return findings
    address, tls = known
    me = _peer_of(tls)
    findings.append(checks.check_certificate(tls))
    try:
        status, seen = await checks.check_coordinator(address, tls)
    except HetnodeError as error:
        findings += [checks.problem("coordinator", error), checks.check_listening(settings)]
        await check_compute(resolve(settings.preset), me)
        return findings
    findings += seen + checks.check_libraries(status.spec)
    if me:
        findings += await check_reach(address, tls, PeerId(me), status, settings)
    else:
        findings += [operator_finding(status), *await check_router(address)]
    findings += await checks.check_connections(address, tls, me, status)
    capacity = await check_compute(status.spec, me)
    findings.append(checks.check_disk(status.spec))
    if capacity is not None:
        findings.append(checks.check_memory(status.spec, capacity))
    return findings


def _known(text: str) -> tuple[Invite | None, tuple[str, Credentials] | None]:
    """The invite, if there is one; address and credentials for its run, or for the one named, if kept here.

    Raises HetnodeError: NO_CREDENTIALS for the name of a run without any; as known_runs.destination does.
    """
    wanted = known_runs.destination(text).invite
    if wanted is None:
        return None, known_runs.member(text) or known_runs.operator_or_member(text)
    keys = sorted(user_config_path("hetnode").glob("peer-*.key"))
    found = (kept for key in keys if (kept := credentials.of_authority(key, wanted.pin)) is not None)
    return wanted, next(((wanted.api, each.tls) for each in found), None)


def _peer_of(tls: Credentials) -> str:
    """The peer whose credentials these are, "" for the operator's."""
    certificate = x509.load_pem_x509_certificate(tls.certificate)
    try:
        authority = x509.load_pem_x509_certificate(tls.authority)
        return certified_peer(certificate.public_bytes(Encoding.DER), authority).peer
    except ValueError:
        return ""


def _folder_of(me: str) -> Path:
    """Where the measured speed is kept: the folder of that node."""
    return user_data_path("hetnode") / "nodes" / PeerId(me) if me else user_data_path("hetnode")
