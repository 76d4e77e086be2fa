"""``hetnode watch``: a run and this machine's node, live in the terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from node import command_runner
from node.cli.own_node import ask_to_leave
from node.folder import run_in
from node.here import known_runs
from node.here.nodes import Node, chosen, meant, nodes_here
from node.security import credentials
from protocol.errors import ErrorCode, HetnodeError

if TYPE_CHECKING:
    from node.security.credentials import Credentials

Run = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN|FOLDER",
        help="A run that this machine is in, or the folder of its coordinator, of 'swarm up' or of a node. "
        "Default: the run of the only node that runs here, or of the only coordinator here.",
    ),
]


def watch(run: Run = None) -> None:
    """Watch a run and this machine's node live in the terminal; '?' shows the keys.

    Keys pause this machine's node, let it take part again, let it leave, and show its log. The view may be
    ended at any time: run and node go on.
    """
    streams = sys.stdin, sys.stdout, sys.stderr  # it is drawn on the last one
    if not all(stream.isatty() for stream in streams) or os.environ.get("TERM") == "dumb":
        raise HetnodeError(
            ErrorCode.BAD_OPTION,
            "'hetnode watch' needs a terminal.",
            "'hetnode status' prints the same once, and 'hetnode status --json' prints it for programs.",
        )
    node, find, folder = watched(run)
    from node.watch.app import WatchApp  # noqa: PLC0415
    from node.watch.sources import CoordinatorSource, OwnNode  # noqa: PLC0415

    own = None if node is None else OwnNode(node[1], lambda: _end(node[0]))
    source = None if find is None else CoordinatorSource(find, folder)
    WatchApp(source, own).run()


Find = Callable[[], tuple[str, "Credentials"]]


def watched(run: str | None) -> tuple[tuple[Node, Path] | None, Find | None, Path | None]:
    """The node of this machine and its folder, how to find the coordinator, and the folder of that.

    None for what is not here. Raises HetnodeError as :func:`known_runs.operator_or_member` where all are.
    """
    node = _node(run)
    if node is not None and run is not None and run_in(Path(run)):  # the folder of a node
        kept = node[0].credentials or next(_credentials_below(Path(run)), None)
        return node, None if kept is None else lambda: known_runs.operator_or_member(str(kept)), None
    wanted = str(node[0].credentials) if run is None and node is not None else meant(run)
    folder = next((each.absolute() for each in known_runs.coordinator_folders(wanted)), None)
    known_runs.operator_or_member(wanted)  # an error now is a message; later it would be a view without a run
    return node, lambda: known_runs.operator_or_member(wanted), folder


def _node(run: str | None) -> tuple[Node, Path] | None:
    """The running node that `run` means, if there is one; without `run` the only one here.

    Raises BAD_OPTION with the choices if there are several.
    """
    try:
        node = chosen(run, list(nodes_here()))
    except HetnodeError as error:
        if error.code is ErrorCode.BAD_OPTION:
            raise
        return None
    return None if node.folder is None or node.pid is None else (node, node.folder.absolute())


def _credentials_below(folder: Path) -> Iterator[Path]:
    """Credentials that a node keeps in its own folder, as in that of 'swarm up'."""
    for kept in sorted(folder.absolute().glob("*.runs/*")):
        if credentials.exist(kept):
            yield kept


def _end(node: Node) -> None:
    if (pid := node.pid) is not None:
        ask_to_leave(node, pid, command_runner.LEAVE)
