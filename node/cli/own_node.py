"""The node of this machine: ``hetnode leave``, ``pause`` and ``resume``."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from node import command_runner
from node.cli.options import option
from node.command_runner import TerminalConsole, bad_option
from node.here.nodes import Node, chosen, nodes_here
from node.home.guest.control import Ask, ask
from node.security import credentials
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
Now = Annotated[bool, option("Do not wait for the end of the round: keep what there is.", "--now")]


def leave(run: Run = None, now: Now = False) -> None:
    """Let this machine's node leave its run in order, and wait until it has.

    The node finishes the round in which it trains, so that no work is lost and no node waits for it,
    saves its progress and ends; 'hetnode join RUN' goes on from there. Where no node runs any more, the
    coordinator is told that this machine does not come back soon.
    """
    command_runner.configure_logging()
    console = TerminalConsole(highlight=False)
    node = chosen(run, list(nodes_here()))
    pid = node.pid
    if pid is None:
        command_runner.run(_farewell(node))
        console.print(f"no node runs here; the coordinator of {node.run} does not wait for it", markup=False)
        return
    ask_to_leave(node, pid, command_runner.LEAVE_AT_ONCE if now else command_runner.LEAVE)
    _wait(f"{node.run} (process {pid})", lambda: node.pid == pid)
    console.print(f"the node has left {node.run}", markup=False)


def pause(run: Run = None, now: Now = False) -> None:
    """Let this machine's node leave its run for now, and wait until it has.

    The node finishes the round in which it trains, saves its progress, and gives back the device and its
    memory. Its process stays, and keeps the node's certificate valid. The pause outlives a restart of the
    node or of this machine; 'hetnode resume' ends it.
    """
    command_runner.configure_logging()
    node, folder = _running_node(run)
    state = ask(folder, Ask.PAUSE_AT_ONCE if now else Ask.PAUSE)
    if state.is_here:
        _wait(node.run, lambda: ask(folder, Ask.STATE).is_here)
        state = ask(folder, Ask.STATE)
    TerminalConsole(highlight=False).print(f"the node of {node.run} rests: {state.reason}", markup=False)


def resume(run: Run = None) -> None:
    """Let a node take part again that 'hetnode pause' has paused."""
    command_runner.configure_logging()
    node, folder = _running_node(run)
    state = ask(folder, Ask.RESUME)
    text = f"it still rests: {state.reason}" if state.reason else "it takes part"
    console = TerminalConsole(highlight=False)
    console.print(f"the node of {node.run} is not paused by hand any more; {text}", markup=False)


def _wait(name: str, is_here: Callable[[], bool]) -> None:
    """Return when the node has left, and say meanwhile how long it takes."""
    began = time.monotonic()
    with TerminalConsole(highlight=False).status("") as line:
        while is_here():
            line.update(f"waiting {time.monotonic() - began:.0f} s for the node of {name} to leave")
            time.sleep(_POLL_SECONDS)


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


def ask_to_leave(node: Node, pid: int, signal_number: signal.Signals) -> None:
    """Send the signal to the process `pid` if it is still that of `node`. Raises BAD_OPTION if it cannot."""
    if not pid:
        raise bad_option(
            f"The node that keeps {node.folder} runs in another container.",
            "Give this command there, or end that container.",
        )
    try:
        if hasattr(os, "pidfd_open"):
            with ExitStack() as stack:
                process = os.pidfd_open(pid)
                stack.callback(os.close, process)
                if node.pid == pid:  # now the number cannot become that of another process any more
                    signal.pidfd_send_signal(process, signal_number)
        else:
            os.kill(pid, signal_number)
    except ProcessLookupError:
        return  # it has just ended
    except PermissionError:
        raise bad_option(f"The node (process {pid}) is another user's.", "Ask as that user.") from None


async def _farewell(node: Node) -> None:
    """Tell the coordinator that the node has gone.

    Raises HetnodeError: NO_CREDENTIALS, ALREADY_ACTIVE, COORDINATOR_UNREACHABLE, CERTIFICATE_REFUSED, ...
    """
    from node.net.coordinator_client import CoordinatorClient  # noqa: PLC0415
    from node.security.identity import open_identity  # noqa: PLC0415

    if node.credentials is None or node.identity is None:
        raise HetnodeError(
            ErrorCode.NO_CREDENTIALS,
            f"No node runs in {node.folder}, and its credentials are not among this user's.",
            "Name the folder of its credentials: that of its --identity, NAME.runs/RUN.",
        )
    known = credentials.load(node.credentials)
    credentials.check_in_date(known, time.time())
    coordinator = CoordinatorClient(known, open_identity(node.identity))
    try:
        await coordinator.leave("left by hand")
    except HetnodeError as error:
        if error.code is not ErrorCode.UNKNOWN_PEER:  # then the coordinator does not wait for it
            raise
    finally:
        await coordinator.close()
