"""``hetnode dashboard``: where the web dashboard of a run is."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from coordinator.ops.dashboard.port import url_for_readers
from node.cli.known_runs import coordinator_folders
from protocol.errors import ErrorCode, HetnodeError

Run = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN|FOLDER",
        help="A run whose coordinator is on this machine, or the folder of its coordinator or of 'swarm up'. "
        "Default: the only coordinator here.",
    ),
]


def dashboard(run: Run = None) -> None:
    """Print the address of a run's web dashboard, to be opened in a browser.

    Where it is served beyond loopback, the address contains the token of its readers: send it like a
    password.
    """
    folder = next(coordinator_folders(run), None)
    if folder is None:
        raise HetnodeError(
            ErrorCode.NO_CREDENTIALS,
            f"There is no folder of a coordinator here{f' for {run!r:.80}' if run else ''}.",
            "Give the folder of the coordinator, on its machine.",
        )
    url = url_for_readers(Path(folder))
    if url is None:
        raise HetnodeError(
            ErrorCode.COORDINATOR_UNREACHABLE,
            f"No dashboard is served for the run in {folder}.",
            "Start its coordinator, without --no-dashboard and with hetnode[dashboard] installed.",
        )
    sys.stdout.write(f"{url}\n")
