"""``hetnode incident``: a run's event log as a file without names and addresses."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from node.cli.options import option
from node.command_runner import TerminalConsole, bad_option
from node.here import known_runs

if TYPE_CHECKING:
    from coordinator.ops.incident.file import Incident

incident_app = typer.Typer(help="Event logs of runs as files that can be shared.", no_args_is_help=True)


@incident_app.callback()
def _incident() -> None:
    """Makes a family of the only command."""


@incident_app.command("export")
def export(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN|FOLDER",
            help="A run whose coordinator is on this machine, or the folder of that coordinator, which may "
            "be running. Default: the only coordinator here.",
        ),
    ] = None,
    out: Annotated[Path, option("The file to write.")] = Path("incident.jsonl.xz"),
) -> None:
    """Write the event log of a run without peer ids, addresses, invites, names and texts of peers.

    Times, speeds, names of devices and the sizes of the run stay: its decisions follow from them.
    'xzcat FILE' shows what is in the file.
    """
    from coordinator.ops.incident.file import to_bytes  # noqa: PLC0415

    incident = _recorded(_coordinator_folder(run))
    content = to_bytes(incident)
    try:
        out.write_bytes(content)
    except OSError as error:
        raise bad_option(
            f"The file {out} cannot be written: {error.strerror}.", "Give another --out."
        ) from None
    _say(f"{out} has {len(incident.events)} events, {len(content) / 1000:.1f} kB.")


def _coordinator_folder(run: str | None) -> Path:
    """Raises BAD_OPTION, NO_CREDENTIALS."""
    from coordinator.store.log_copy import LOG_FILE  # noqa: PLC0415

    found = known_runs.only_coordinator() if run is None else known_runs.coordinator_folder(run, LOG_FILE)
    if found is None:
        raise known_runs.no_coordinator(run)
    return found


def _recorded(folder: Path) -> Incident:
    from coordinator.ops.incident.file import Incident  # noqa: PLC0415
    from coordinator.ops.incident.redaction import redacted_log, redacted_spec  # noqa: PLC0415
    from coordinator.store.log_copy import read_copy  # noqa: PLC0415
    from node.security.identity import peer_in  # noqa: PLC0415
    from protocol.server.version import program_version  # noqa: PLC0415

    spec, log = read_copy(folder, peer_in(folder / "identity.key"))
    return Incident(redacted_spec(spec), redacted_log(log), program_version(), "")


def _say(line: str) -> None:
    # Texts of the file are shown as they are, not as markup.
    TerminalConsole().print(line, highlight=False, markup=False, soft_wrap=True)
