"""``hetnode status``: shows what a run is doing."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from node import command_runner
from node.cli import known_runs

Run = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN|FOLDER",
        help="A run that this machine is or was in, or the folder of its coordinator or of 'swarm up'. "
        "Default: the only coordinator here.",
    ),
]


def status(run: Run = None) -> None:
    """Show what a run is doing, who takes part, and how the loss goes."""
    from node.net.coordinator_channel import fetch_status  # noqa: PLC0415
    from node.views.status import status_view  # noqa: PLC0415

    address, credentials = known_runs.operator_or_member(run)
    Console().print(status_view(command_runner.run(fetch_status(address, credentials))))
