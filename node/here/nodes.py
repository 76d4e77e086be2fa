"""The nodes of this user on this machine, and which of them, or whose model, a person means."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from platformdirs import user_config_path

from coordinator.base.phrases import short
from node.command_runner import bad_option
from node.folder import node_folder_of, run_in, running_process
from node.here import known_runs
from node.here.known_runs import node_name
from node.security import credentials
from node.security.credentials import RunCredentials
from protocol.errors import ErrorCode, HetnodeError
from protocol.trust.public_name import name_as_text
from protocol.trust.short_id import named_by
from protocol.types import PeerId

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


def place_of(run: Path) -> Path:
    """`run`; for the name of a swarm, run or node, or the folder of credentials, where its model is here.

    Raises HetnodeError BAD_OPTION if several nodes of this machine are in it.
    """
    if run.exists() and not credentials.exist(run):
        return run
    if swarm := known_runs.swarm_called(str(run)):
        return swarm
    here = [node for node in nodes_here() if node.folder is not None and run_in(node.folder) == node.run]
    try:
        return chosen(str(run), here).folder or run
    except HetnodeError as error:
        if error.code is not ErrorCode.NO_CREDENTIALS:
            raise
        return run
