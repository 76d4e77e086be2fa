"""The node of this machine: ``hetnode leave``, ``pause`` and ``resume``."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from platformdirs import user_config_path

from coordinator.base.phrases import short
from node import command_runner
from node.cli import known_runs
from node.cli.known_runs import node_name
from node.cli.options import option
from node.command_runner import TerminalConsole, bad_option
from node.folder import node_folder_of, run_in, running_process
from node.home.guest.control import Ask, ask
from node.security import credentials
from node.security.credentials import RunCredentials
from protocol.errors import ErrorCode, HetnodeError
from protocol.trust.public_name import name_as_text
from protocol.trust.short_id import named_by
from protocol.types import PeerId

_POLL_SECONDS = 0.2
_KEY = "identity.key"


@dataclass(frozen=True)
class Node:
    """A node of this machine. `credentials` is None where they are not among this user's."""

    run: str
    credentials: Path | None
    folder: Path | None

    @property
    def pid(self) -> int | None:
        """Of its process, while it runs; 0 where that cannot be seen from here."""
        # The same key and folder serve one run after the other: the mark tells which it is now.
        if self.folder is None or run_in(self.folder) not in ("", self.run):
            return None
        return running_process(self.folder)

    @property
    def identity(self) -> Path | None:
        return None if self.credentials is None else self.credentials.parent.with_suffix(".key")

    @property
    def names(self) -> tuple[str, ...]:
        """All that means it: its run, its key's name, and its peer id and public name as others see them."""
        known = self._loaded()
        if known is None or self.identity is None:
            return self.run, str(self)
        from node.security.identity import peer_in  # noqa: PLC0415

        return self.run, str(self), peer_in(self.identity), *([known.name] if known.name else [])

    @property
    def described(self) -> str:
        """For a choice: ``peer-0 (..i7TXz4no, Ada, replica, of tiny-...)``."""
        known, (run, key, *others) = self._loaded(), self.names
        if known is None or not others:
            return key
        public = [name_as_text(known.name)] if known.name else []
        return f"{key} ({', '.join([short(PeerId(others[0])), *public, known.role or 'auto', f'of {run}'])})"

    def _loaded(self) -> RunCredentials | None:
        """None where the credentials or the key are not here, or damaged."""
        if self.identity is None or self.credentials is None or not self.identity.exists():
            return None
        try:
            return credentials.load(self.credentials)
        except HetnodeError:
            return None

    def __str__(self) -> str:
        return node_name(self.credentials) if self.credentials else str(self.folder)


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


def nodes_here() -> Iterator[Node]:
    """The nodes of this user whose keys are in the usual place, whether they run or not."""
    for key in sorted(user_config_path("hetnode").glob("peer-*.key")):
        for folder in sorted(key.with_suffix(".runs").glob("*")):
            if credentials.exist(folder):
                yield Node(folder.name, folder, node_folder_of(folder))


def meant(run: str | None) -> str | None:
    """`run`; where none is named and no coordinator runs here, the run of the nodes that run here.

    Without either, None for a coordinator that was here, else the only run that this machine was let into.
    Raises BAD_OPTION if nodes of several runs are or were here.
    """
    if run is not None:
        return run
    from node.security.identity import is_in_use  # noqa: PLC0415

    if any(is_in_use(each / _KEY) for each in known_runs.coordinator_folders(None)):
        return None
    runs = sorted({node.run for node in nodes_here() if node.pid is not None})
    is_former = not runs and not known_runs.has_coordinators()
    found = known_runs.runs_here() if is_former else runs
    if len(found) > 1:
        be = "were" if is_former else "are"
        raise bad_option(f"Nodes of several runs {be} here: {', '.join(found)}.", "Name one of them.")
    return next(iter(found), None)


def chosen(wanted: str | None, known: list[Node]) -> Node:
    """The node that `wanted` names: by its run, its folder, or as messages do; None: the only one that runs.

    Raises HetnodeError: NO_CREDENTIALS where there is none, BAD_OPTION where there are several.
    """
    if wanted is not None:
        folder = Path(wanted)
        if credentials.exist(folder):
            return Node(credentials.load(folder).run, folder, node_folder_of(folder))
        if run := run_in(folder):
            own = (node for node in known if node.folder == folder.absolute() and node.run == run)
            return next(own, Node(run, None, folder.absolute()))
        wanted = named_by(wanted, [name for node in known for name in node.names], "nodes and runs")
    candidates = [node for node in known if wanted is None or wanted in node.names]
    running = [node for node in candidates if node.pid is not None]
    # Where nodes of several containers share a volume, the one of this container is meant.
    running = [node for node in running if node.pid] or running
    if len(running) == 1 or (wanted is not None and not running and len(candidates) == 1):
        return (running or candidates)[0]
    choices = ", ".join(node.described for node in running or candidates or known)
    if running or (wanted is not None and candidates):
        raise bad_option(f"Several nodes of this machine are meant: {choices}.", "Name one of them.")
    raise HetnodeError(
        ErrorCode.NO_CREDENTIALS,
        f"No node or run here is called {wanted!r:.80}." if wanted else "No node runs on this machine.",
        f"Start one with 'hetnode join', or name one that was here: {choices}."
        if choices
        else "'hetnode join INVITE' takes part in a run.",
    )


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
