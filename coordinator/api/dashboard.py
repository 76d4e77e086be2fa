"""What the coordinator asks of its dashboard, and what its folder says of one. A leaf is one.

The leaf is coordinator.ops.dashboard.
"""

from __future__ import annotations

import logging
import secrets
import shlex
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from coordinator.api.run_records import RunRecords
from coordinator.run.command_loop import CommandLoop
from coordinator.run.state.events import Event
from protocol.trust.private_file import write_private, write_whole
from protocol.types import PeerId

log = logging.getLogger(__name__)

USUAL_ADDRESS = "127.0.0.1:7780"
_URL_FILE, _TOKEN_FILE = "dashboard-url", "dashboard-token"
_TOKEN_BYTES = 32
_NEEDS_TOKEN = "needs a token"


@dataclass(frozen=True)
class Entrance:
    """How newcomers find the run, as its page tells them (protocol.wire.run_page.RunPage)."""

    authority: str
    contact: str
    invite: str


class NoDashboard:
    """Stands in for the dashboard where none is part of the program. Arguments as those of the leaf.

    Attributes:
        feed: gets the events of the run.
        resting: gets the peers whose processes rest, with the number of their calls.
    """

    def __init__(self, address: str | None, or_near: bool, stack: AsyncExitStack) -> None:
        if address and not or_near:
            log.warning("there is no dashboard at %s: this program has none", address)
        self.feed, self.resting = self, Counter[PeerId]()

    def note(self, event: Event) -> None:
        """Keep nothing."""

    def serve(self, folder: Path, command_loop: CommandLoop, records: RunRecords, entrance: Entrance) -> None:
        """Serve nothing."""


def write_url(folder: Path, url: str, needs_token: bool) -> None:
    """Say in the run's `folder` where its dashboard is."""
    write_whole(folder / _URL_FILE, f"{url}\n{_NEEDS_TOKEN if needs_token else ''}\n")


def forget_url(folder: Path) -> None:
    """Nothing is served any more."""
    (folder / _URL_FILE).unlink(missing_ok=True)


def url_in(folder: Path) -> str | None:
    """The address of the dashboard, without the token; None if none is served."""
    found = _lines(folder)
    return found[0] if found else None


def command_for(folder: Path, program: str = "hetnode") -> str:
    """The command that shows the pages of the run in `folder`, whether its coordinator runs or not."""
    return shlex.join([program, "status", "--dashboard", str(folder)])


def url_for_readers(folder: Path) -> str | None:
    """As :func:`url_in`, with the token where it is needed. It is behind the #, which no browser sends."""
    found = _lines(folder)
    if found[1:] != [_NEEDS_TOKEN]:
        return found[0] if found else None
    return f"{found[0]}login#{token_of(folder)}"


def token_of(folder: Path) -> str:
    """The token of the run in `folder`, in a file for its owner alone; the first call makes it."""
    path = folder / _TOKEN_FILE
    if not path.exists() or not path.read_text().strip():
        write_private(path, f"{secrets.token_urlsafe(_TOKEN_BYTES)}\n".encode())
    return path.read_text().strip()


def _lines(folder: Path) -> list[str]:
    path = folder / _URL_FILE
    return path.read_text().strip().splitlines() if path.exists() else []
