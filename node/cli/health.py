"""``hetnode health``: whether a node or a coordinator of this machine is well."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from node import command_runner
from node.cli.options import option
from node.cli.output import say
from node.here.nodes import chosen, nodes_here
from node.home.guest.control import Ask, GuestState, ask
from node.security import credentials
from protocol.errors import ErrorCode, HetnodeError

_ANSWER_SECONDS = 5.0


def health(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN|FOLDER",
            help="A run that this machine is in, or the folder of a node, of its credentials, or of a "
            "coordinator. Default: that of the only node that runs here.",
        ),
    ] = None,
    away: Annotated[
        float, option("How many seconds the coordinator may be away from a node that is well.", min=0)
    ] = 600.0,
) -> None:
    """Say whether a node or a coordinator of this machine is well.

    It ends with status 0 if it is. A node is well if it answers, and its coordinator has answered it not long
    ago, or it rests on purpose. A coordinator is well if its API answers within 5 seconds.
    """
    if run is not None and (Path(run) / "operator.pem").exists():
        say(_coordinator_health(Path(run)))
    else:
        say(_node_health(_node_folder(run), away))


def _node_folder(run: str | None) -> Path:
    """The folder of the node that `run` names. Raises HetnodeError as `chosen`; NODE_NOT_RUNNING."""
    if run is not None and Path(run).is_dir() and not credentials.exist(Path(run)):
        return Path(run)  # perhaps of a node that has never reached its coordinator
    node = chosen(run, list(nodes_here()))
    if node.folder is None:
        raise HetnodeError(
            ErrorCode.NODE_NOT_RUNNING,
            f"No node of {node.run} has run on this machine.",
            "Start it with 'hetnode join', or name another with its folder.",
        )
    return node.folder


def _node_health(folder: Path, away: float) -> str:
    """A sentence about the node that is well. Raises NODE_NOT_RUNNING, COORDINATOR_UNREACHABLE."""
    state = ask(folder, Ask.STATE)
    if state.reason and not state.is_here:
        return f"the node rests: {state.reason}"
    if state.silent_seconds > away:
        raise HetnodeError(
            ErrorCode.COORDINATOR_UNREACHABLE,
            f"The coordinator has not answered this node for {state.silent_seconds:.0f} s.",
            "Check that 'hetnode coordinator' runs, and the network of this machine. The node goes on by "
            "itself when it answers.",
        )
    return _sentence(state)


def _sentence(state: GuestState) -> str:
    what = "the node starts, or waits for its coordinator"
    if state.has_joined:
        what = f"the node takes part, in round {state.round_number}"
    if state.silent_seconds >= 1:
        what += f"; the coordinator has not answered for {state.silent_seconds:.0f} s"
    return what


def _coordinator_health(folder: Path) -> str:
    """A sentence about the coordinator that is well. Raises HetnodeError if its API does not answer."""
    from coordinator.status.cause_text import status_text  # noqa: PLC0415
    from node.net.coordinator_channel import fetch_status  # noqa: PLC0415

    address, operator = credentials.load_operator(folder)
    status = command_runner.run(fetch_status(address, operator, _ANSWER_SECONDS))
    return f"the coordinator answers: {status.rounds_decided} rounds are decided; {status_text(status)}"
