"""How a ``hetnode`` process lives and ends: event loop, signals, lifeline, and errors as messages."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from ipaddress import ip_address
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from protocol.errors import FAILURE_FILE, ErrorCode, ExitCode, HetnodeError, first_error
from protocol.server.terminal import VisibleFormatter, visible
from protocol.trust import host_port
from protocol.trust.private_file import write_whole

log = logging.getLogger(__name__)
T = TypeVar("T")
_Choice = TypeVar("_Choice", bound=StrEnum)
_LABEL = r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)"  # names of containers have underscores
_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})*\.?")


VERBOSE = "HETNODE_VERBOSE"
"""The environment variable by which commands log details, as ``hetnode --verbose`` sets it."""
LIFELINE = "HETNODE_LIFELINE"
"""The environment variable with the descriptor of a pipe: the command ends when its parent closes that."""

LEAVE, LEAVE_AT_ONCE = signal.SIGUSR1, signal.SIGUSR2
"""Ask a process that can drain to do that, or to leave in order without it. Asking again changes nothing."""


class TerminalConsole(Console):
    """The console of every command: its texts are :func:`visible`, whoever wrote them; styles are its own."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))


class Interrupted(Exception):
    """A person or a supervisor asked the process to end."""


class _Stage(Enum):
    RUNNING = auto()
    DRAINING = auto()
    LEAVING = auto()


@dataclass(frozen=True)
class Draining:
    """How a process finishes its work: `begin` lets `main` end by itself within `seconds`; 0 ends it at once.

    `message` is logged when draining begins.
    """

    begin: Callable[[], None]
    seconds: float
    message: str


class _Ending:
    """How the process reacts when it is asked to end. `task` runs the command."""

    def __init__(self, task: asyncio.Future[Any], drain: Draining | None) -> None:
        self._task, self._drain = task, drain
        self._is_urgent = False  # asked again after it began to leave in order
        self.stage = _Stage.RUNNING

    def leave_at_once(self) -> None:
        """Cancel the task once: a second time would interrupt what it saves."""
        if self.stage is not _Stage.LEAVING:
            self.stage = _Stage.LEAVING
            self._task.cancel()

    def leave(self) -> None:
        """Let the task drain if it can; otherwise leave at once."""
        if self._drain is None or not self._drain.seconds:
            self.leave_at_once()
        elif self.stage is _Stage.RUNNING:
            self.stage = _Stage.DRAINING
            log.warning("%s", self._drain.message)
            self._drain.begin()
            asyncio.get_running_loop().call_later(self._drain.seconds, self.leave_at_once)

    def interrupt(self) -> None:
        """Take the next step: drain, then leave in order, then end the process."""
        if self._is_urgent:
            os._exit(ExitCode.INTERRUPTED)
        if self.stage is _Stage.RUNNING:
            self.leave()
        else:
            self.leave_at_once()
        if self.stage is _Stage.LEAVING:
            log.warning("asked to end: this process ends in order; asked again, it ends at once")
        self._is_urgent = self.stage is _Stage.LEAVING


def run(main: Coroutine[Any, Any, T], drain: Draining | None = None) -> T:
    """Run `main` on uvloop until it ends, or is asked to end.

    SIGINT and SIGTERM act in three steps. The first lets `main` drain, if it can, and cancels it when the
    time for that is over. The next one, or the end of the pipe :data:`LIFELINE`, cancels it at once. In both
    cases it leaves in order; one more signal ends the process immediately.

    Raises:
        Interrupted: `main` was cancelled, and has ended.
    """

    told = os.environ.get(LIFELINE)
    lifeline = int(told) if told else None

    async def supervised() -> T:
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(main)
        ending = _Ending(task, drain)

        def lifeline_ended() -> None:
            assert lifeline is not None
            loop.remove_reader(lifeline)
            ending.leave_at_once()

        for signal_number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signal_number, ending.interrupt)
        if drain is not None:
            loop.add_signal_handler(LEAVE, ending.leave)
            loop.add_signal_handler(LEAVE_AT_ONCE, ending.leave_at_once)
        if lifeline is not None:
            loop.add_reader(lifeline, lifeline_ended)
        try:
            return await task
        except asyncio.CancelledError:
            if ending.stage is not _Stage.LEAVING:
                raise
            raise Interrupted from None

    import uvloop  # noqa: PLC0415  only commands with an event loop need it

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(supervised())


def exit_code_after(error: BaseException) -> ExitCode:
    """Show an expected failure of a command and return the status with which it ends. Raises all others."""
    if isinstance(error, Interrupted):
        return ExitCode.INTERRUPTED
    cause = first_error(error)
    if not isinstance(cause, HetnodeError):
        raise error
    show_error(cause)
    if file := os.environ.get(FAILURE_FILE):
        write_whole(Path(file), json.dumps({"code": cause.code.label, "cause": cause.cause}))
    return cause.code.exit_code


def show_error(error: HetnodeError) -> None:
    """Print one message on standard error: what failed, and what to do."""
    console = TerminalConsole(stderr=True, highlight=False, soft_wrap=True)
    console.print(f"[bold red]error[/] \\[{error.code.label}] ", end="")
    console.print(f"{error.cause} {error.remedy}".strip(), markup=False)


def configure_logging() -> Console | None:
    """Log to standard error: for people on a terminal, one plain line per record elsewhere.

    Returns the console of a terminal on which more than the log can be shown; else None.
    """
    console = None
    level = logging.DEBUG if os.environ.get(VERBOSE) else logging.INFO
    handler: logging.Handler
    if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        from rich.logging import RichHandler  # noqa: PLC0415

        console = TerminalConsole(stderr=True)
        handler = RichHandler(console=console, show_path=False, markup=False)
        handler.setFormatter(VisibleFormatter("%(message)s", "%H:%M:%S"))
    else:
        handler = logging.StreamHandler()
        handler.setFormatter(VisibleFormatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for noisy in ("asyncio", "grpc", "matplotlib", "datasets", "httpx", "filelock"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    return console if console is not None and console.encoding.startswith("utf") else None


def bad_option(cause: str, remedy: str) -> HetnodeError:
    return HetnodeError(ErrorCode.BAD_OPTION, cause, remedy)


def one_of(kind: type[_Choice], value: str, option: str) -> _Choice:
    """The member of `kind` that `option` names. Raises HetnodeError BAD_OPTION, which lists them."""
    try:
        return kind(value)
    except ValueError:
        raise bad_option(f"{option} knows no '{value}'.", f"Use one of: {', '.join(kind)}.") from None


def split_address(address: str, option: str) -> tuple[str, int]:
    """``HOST:PORT`` as host and port. Raises HetnodeError BAD_ADDRESS naming the option."""
    try:
        return host_port.split_host_port(address)
    except ValueError:
        raise HetnodeError(
            ErrorCode.BAD_ADDRESS,
            f"{option} '{address}' is not HOST:PORT.",
            "Write it like 127.0.0.1:7700 or [::1]:7700.",
        ) from None


def bare_host(host: str | None, option: str) -> str | None:
    """A name or an address, an IPv6 address without its brackets. Raises BAD_ADDRESS naming the option."""
    try:
        bare = host and host_port.bare_host(host)
        # A name that ends in digits is an address for every resolver.
        if bare and (not _NAME.fullmatch(bare) or bare.rpartition(".")[2].isdecimal()):
            ip_address(bare)
        return bare
    except ValueError:
        raise HetnodeError(
            ErrorCode.BAD_ADDRESS,
            f"{option} '{host}' is neither the name of a host nor an address.",
            "Give a name or an address alone, without a port and without http://.",
        ) from None
