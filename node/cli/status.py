"""``hetnode status``: shows what a run is doing."""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from node import command_runner
from node.cli.options import option
from node.cli.output import say
from node.command_runner import TerminalConsole, bad_option
from node.extras import require_for_dashboard
from node.here import known_runs
from protocol.errors import ErrorCode, HetnodeError
from protocol.status import Explanation, RunStatus

if TYPE_CHECKING:
    from coordinator.run.state.state import State
    from coordinator.store.history import SqliteHistory
    from coordinator.store.store import SqliteStore

Run = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN|FOLDER",
        help="A run that this machine is or was in, or the folder of its coordinator or of 'swarm up'. "
        "Default: the only coordinator here, or the run of the nodes here.",
    ),
]

_KEY = "identity.key"
AWAY = (ErrorCode.COORDINATOR_UNREACHABLE, ErrorCode.WRONG_AUTHORITY, ErrorCode.NO_CREDENTIALS)
"""Then the folder tells more than nothing. Other errors are refusals, or the user's own."""


def status(
    run: Run = None,
    as_json: Annotated[
        bool, option("Print one JSON object instead, for programs; docs/operate.md describes it.", "--json")
    ] = False,
    dashboard: Annotated[
        bool,
        option(
            "Print the address of the web dashboard instead, on the coordinator's machine. Beyond loopback "
            "it contains the token of its readers: send it like a password. While the coordinator does not "
            "run, this command serves the pages from its folder, on loopback, until Ctrl-C.",
            "--dashboard",
        ),
    ] = False,
) -> None:
    """Show what a run is doing, who takes part, and how the loss goes.

    While the coordinator does not run, this reads its folder, if that is on this machine.
    """
    from node.cli import finished  # noqa: PLC0415
    from node.here.nodes import meant  # noqa: PLC0415
    from node.net.coordinator_channel import fetch_status  # noqa: PLC0415

    if dashboard:
        if as_json:
            raise bad_option("--dashboard prints an address, and --json the status.", "Give one of them.")
        _dashboard_of(run)
        return
    run = meant(run)
    try:
        address, credentials = known_runs.operator_or_member(run)
        found = command_runner.run(fetch_status(address, credentials))
    except HetnodeError as error:
        stored = stored_status(run) if error.code in AWAY else None
        text = None if as_json and stored else finished.text_of(run)
        if text is not None and not as_json:
            TerminalConsole(highlight=False, soft_wrap=True).print(text, markup=False)
        elif stored is not None:
            _show(stored, as_json, _silence_of(run))
        else:
            raise
    else:
        _show(found, as_json)


def stored_status(run: str | None) -> RunStatus | None:
    """The last status of `run` from the folder of its coordinator; None where there is none."""
    from coordinator.store.log_copy import last_status  # noqa: PLC0415

    folder = stored_run(run)
    return None if folder is None else last_status(folder)


def stored_run(run: str | None) -> Path | None:
    """The folder of the coordinator of `run` on this machine, with its log; None where there is none."""
    from coordinator.store.log_copy import LOG_FILE  # noqa: PLC0415

    return known_runs.coordinator_folder(run, LOG_FILE)


def _silence_of(run: str | None) -> str:
    """Why the coordinator of `run`, which has its folder here, does not answer."""
    from node.cli.finished import reason_of_silence  # noqa: PLC0415

    folder = stored_run(run)
    reason = reason_of_silence(folder) if folder else None
    return reason.cause if reason else "The coordinator does not answer."


def _show(status: RunStatus, as_json: bool, silence: str = "") -> None:
    """`silence`: why the coordinator does not answer, for a status from its folder."""
    from coordinator.status.document import document  # noqa: PLC0415
    from node.views.status import as_of_note, status_view  # noqa: PLC0415

    if as_json:
        say(json.dumps({"live": not silence, **document(status)}, allow_nan=False))
        return
    notes = [as_of_note(status, time.time(), silence)] if silence else []
    TerminalConsole(highlight=False).print(status_view(status, not silence, notes))


def _dashboard_of(run: str | None) -> None:
    """Print where the web dashboard of `run` is; serve it if the coordinator does not run, until Ctrl-C.

    Raises NO_CREDENTIALS, COORDINATOR_UNREACHABLE, MISSING_EXTRA, STORE_CORRUPT, PORT_IN_USE.
    """
    from coordinator.api.dashboard import USUAL_ADDRESS, url_for_readers  # noqa: PLC0415
    from node.security.identity import is_in_use  # noqa: PLC0415

    folder = next(known_runs.coordinator_folders(run), None)
    if folder is not None and is_in_use(folder / _KEY):
        if (url := url_for_readers(folder)) is None:
            raise HetnodeError(
                ErrorCode.COORDINATOR_UNREACHABLE,
                f"No dashboard is served for the run in {folder}.",
                "Start its coordinator without '--dashboard none' and with hetnode[dashboard] installed.",
            )
        say(url)
        return
    if (kept := stored_run(run)) is None:
        raise HetnodeError(
            ErrorCode.NO_CREDENTIALS,
            f"There is no folder of a coordinator here{f' for {run!r:.80}' if run else ''}.",
            "Give the folder of the coordinator, on its machine.",
        )
    require_for_dashboard()
    from coordinator.ops.dashboard.kept import serve_kept  # noqa: PLC0415
    from coordinator.ops.explain.explain import explain  # noqa: PLC0415

    def told(url: str) -> None:
        say(url)
        sys.stdout.flush()  # it may be a file
        note = f"The coordinator is not running: these pages show what is in {kept}. Ctrl-C ends them."
        TerminalConsole(stderr=True, highlight=False, soft_wrap=True).print(note, markup=False)
        sys.stderr.flush()

    def explained(question: str, state: State, history: SqliteHistory, store: SqliteStore) -> Explanation:
        return explain(question, state, history, store.read, state.latest_at)

    with suppress(command_runner.Interrupted):  # the usual end
        command_runner.run(serve_kept(kept, USUAL_ADDRESS, explained, told))
