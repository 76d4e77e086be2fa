"""``hetnode doctor``: checks whether this machine can take part in a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from platformdirs import user_config_path, user_data_path
from rich.console import Console
from rich.table import Table
from rich.text import Text

from node import command_runner
from node.cli import doctor_checks as checks
from node.cli import known_runs
from node.cli.doctor_checks import Finding, NodeSettings, Severity
from node.ipc.template import own_template
from node.measure import hardware
from node.security import credentials
from node.security.credentials import Credentials
from protocol.errors import ExitCode, HetnodeError
from protocol.spec.resolve import resolve
from protocol.trust.invite import Invite, is_invite
from protocol.trust.tls import certified_peer, pin_of
from protocol.types import PeerId


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
    settings = NodeSettings(device, threads or hardware.available_threads(), host, port, advertise, preset)
    findings = command_runner.run(examine(settings, run, invite_file))
    Console().print(findings_view(findings))
    first = next((finding for finding in findings if finding.severity is Severity.PROBLEM), None)
    if first is not None:
        raise typer.Exit(int(first.code.exit_code if first.code else ExitCode.INTERNAL))


def findings_view(findings: list[Finding]) -> Table:
    colours = {Severity.OK: "green", Severity.WARNING: "yellow", Severity.PROBLEM: "bold red"}
    table = Table("", "", "found", "what to do", title="hetnode doctor")
    for each in findings:
        severity = Text(each.severity, colours[each.severity])
        table.add_row(severity, each.subject, Text(each.found), Text(each.remedy))
    return table


async def examine(settings: NodeSettings, text: str | None, invite_file: Path | None) -> list[Finding]:
    """All findings, in the order in which they are shown. Raises HetnodeError for a run that is none."""
    own_template()  # imports torch while the other checks run
    findings = [checks.check_listening(settings)]
    if text is None and invite_file is None:
        spec = resolve(settings.preset)
        findings += (await checks.check_compute(settings, spec, _folder_of(None)))[1]
        findings.append(checks.check_disk(spec))
        findings.append(
            Finding(
                "run", Severity.OK, "none was named", "Type 'hetnode doctor RUN' for one that you are in."
            )
        )
        return findings
    invite, known = _known(text, invite_file)
    if known is None:
        assert invite is not None, "a run without credentials is refused before"
        findings += await checks.check_reachable(invite)
        findings += (await checks.check_compute(settings, resolve(settings.preset), _folder_of(None)))[1]
        return findings
    address, tls = known
    me = _peer_of(tls)
    findings.append(checks.check_certificate(tls))
    try:
        status, seen = await checks.check_coordinator(address, tls)
    except HetnodeError as error:
        findings.append(checks.problem("coordinator", error))
        findings += (await checks.check_compute(settings, resolve(settings.preset), _folder_of(me)))[1]
        return findings
    spec = status.spec
    findings += seen
    findings += await checks.check_connections(address, tls, me, status)
    capacity, computed = await checks.check_compute(settings, spec, _folder_of(me))
    findings += [*computed, checks.check_disk(spec)]
    if capacity is not None:
        findings.append(checks.check_memory(spec, capacity))
    return findings


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
