"""``hetnode credit``: what each peer has contributed to a run."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from coordinator.store.history_answers import CreditOrder, Page
from node.cli import known_runs
from node.cli.options import option
from protocol.errors import ErrorCode, HetnodeError


def credit(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN|FOLDER",
            help="A run whose coordinator is on this machine, or the folder of its coordinator or of "
            "'swarm up'. Default: the only coordinator here.",
        ),
    ] = None,
    by: Annotated[
        CreditOrder, option("Sort by this, the most first; 'peer' sorts by peer id.")
    ] = CreditOrder.TOKENS,
    most: Annotated[int, option("Peers to show.", min=1, max=100_000)] = 50,
    as_json: Annotated[bool, option("Print one JSON object instead, for programs.", "--json")] = False,
) -> None:
    """Show what each peer has contributed: stage tokens, stage rounds and bytes.

    Reads the history in the folder of the coordinator, whether that runs or not.
    """
    from coordinator.store.history import SqliteHistory  # noqa: PLC0415
    from node.views.credit import credit_view  # noqa: PLC0415

    found = SqliteHistory(_file_of(run)).credits(by, Page(0, most))
    if as_json:
        typer.echo(json.dumps(asdict(found), allow_nan=False))
    else:
        Console(highlight=False).print(credit_view(found))


def _file_of(run: str | None) -> Path:
    """The history of a run. One that is not there is an error where it is read."""
    from coordinator.store.history_file import HISTORY_FILE  # noqa: PLC0415

    if folder := known_runs.coordinator_folder(run, HISTORY_FILE) or known_runs.coordinator_folder(run):
        return folder / HISTORY_FILE
    if run is None:
        known_runs.only_coordinator()  # says why there is none
    raise HetnodeError(
        ErrorCode.NO_HISTORY,
        f"There is no history of {run!r:.80} on this machine.",
        "Give the folder of the run's coordinator.",
    )
