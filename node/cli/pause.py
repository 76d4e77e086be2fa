"""``hetnode pause`` and ``hetnode resume``: a node of this machine rests, and takes part again."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from node import command_runner
from node.cli.leave import Node, chosen, nodes_here
from node.cli.options import option
from node.home.guest.control import Ask, ask
from protocol.errors import ErrorCode, HetnodeError

_POLL_SECONDS = 0.2

Run = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN|FOLDER",
        help="A run that this machine is in, or the folder of a node or of its credentials. Default: that of "
        "the only node that runs here.",
    ),
]


def pause(
    run: Run = None,
    now: Annotated[
        bool, option("Do not wait for the end of the round: keep what there is and rest.", "--now")
    ] = False,
) -> None:
    """Let this machine's node leave its run for now, and wait until it has.

    The node finishes the round in which it trains, saves its progress, and gives back the device and its
    memory. Its process stays, and keeps the node's certificate valid. The pause outlives a restart of the
    node or of this machine; 'hetnode resume' ends it.
    """
    command_runner.configure_logging()
    console = Console(highlight=False)
    node, folder = _running_node(run)
    state = ask(folder, Ask.PAUSE_AT_ONCE if now else Ask.PAUSE)
    began = time.monotonic()
    with console.status("") as line:
        while state.is_here:
            line.update(f"waiting {time.monotonic() - began:.0f} s for the node of {node.run} to leave")
            time.sleep(_POLL_SECONDS)
            state = ask(folder, Ask.STATE)
    console.print(f"the node of {node.run} rests: {state.reason}", markup=False)


def resume(run: Run = None) -> None:
    """Let a node take part again that 'hetnode pause' has paused."""
    command_runner.configure_logging()
    node, folder = _running_node(run)
    state = ask(folder, Ask.RESUME)
    text = f"it still rests: {state.reason}" if state.reason else "it takes part"
    console = Console(highlight=False)
    console.print(f"the node of {node.run} is not paused by hand any more; {text}", markup=False)


def _running_node(run: str | None) -> tuple[Node, Path]:
    """The node that `run` names, and its folder. Raises HetnodeError as `chosen`, and NODE_NOT_RUNNING."""
    node = chosen(run, list(nodes_here()))
    if node.folder is None or node.pid is None:
        raise HetnodeError(
            ErrorCode.NODE_NOT_RUNNING,
            f"No node of {node.run} runs on this machine.",
            "Start it with 'hetnode join', or name another with its folder.",
        )
    return node, node.folder
