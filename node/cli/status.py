"""``hetnode status``: shows what a run is doing."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from node import command_runner
from node.cli import known_runs
from protocol.errors import HetnodeError

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
    from node.cli import finished  # noqa: PLC0415
    from node.net.coordinator_channel import fetch_status  # noqa: PLC0415
    from node.views.status import status_view  # noqa: PLC0415

    try:
        address, credentials = known_runs.operator_or_member(run)
        found = command_runner.run(fetch_status(address, credentials))
    except HetnodeError:
        if (text := finished.text_of(run)) is None:
            raise
        Console(highlight=False, soft_wrap=True).print(text, markup=False)
    else:
        Console().print(status_view(found))
