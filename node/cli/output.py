"""Standard output as it is: any encoding, and perhaps on a disk that is full."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from traceback import format_exception
from types import TracebackType
from typing import TYPE_CHECKING, Any

from protocol.errors import ErrorCode, HetnodeError
from protocol.server.terminal import visible

if TYPE_CHECKING:
    from rich.console import Console


class CommandOutput(io.TextIOWrapper):
    """Standard output of a command. Characters that its encoding does not have become question marks.

    Raises HetnodeError OUTPUT_UNWRITABLE for what cannot be written, unless this output `is_optional`; a
    reader that is gone, as after ``| head``, stays a BrokenPipeError, which ends a command in silence.
    """

    is_optional = False

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError as error:
            self._failed(error)
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            self._failed(error)

    def _failed(self, error: OSError) -> None:
        if not self.is_optional:
            raise self._failure(error) from None

    def _failure(self, error: OSError) -> Exception:
        # Python would write what is left at its end, and fail again with a message of its own.
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
        if error.errno == errno.EPIPE:
            return error
        return HetnodeError(
            ErrorCode.OUTPUT_UNWRITABLE,
            f"The output cannot be written: {error.strerror or error}.",
            "Make room where it goes, or write it elsewhere.",
        )


def say(text: str, end: str = "\n") -> None:
    """Print `text`: on a terminal what is visible of it, elsewhere every character.

    Commands print with this and with a TerminalConsole alone.
    """
    sys.stdout.write((visible(text) if sys.stdout.isatty() else text) + end)


def _show_failure(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
    sys.stderr.write(visible("".join(format_exception(kind, error, where))))


def open_output() -> None:
    """Use :class:`CommandOutput` in this process; of standard error what cannot be written is left out."""
    sys.excepthook = _show_failure
    for name in ("stdout", "stderr"):
        if isinstance(plain := getattr(sys, name), io.TextIOWrapper):
            form: dict[str, Any] = {"encoding": plain.encoding, "line_buffering": plain.line_buffering}
            # Opened anew: a fork's streams believe that they are the files of its template.
            file = io.BufferedWriter(io.FileIO(plain.fileno(), "wb", closefd=False))
            setattr(sys, name, CommandOutput(file, errors="replace", **form))
    if isinstance(sys.stderr, CommandOutput):
        sys.stderr.is_optional = True


def open_log_of_service() -> Console | None:
    """As :func:`configure_logging`, for a process that serves others for days.

    It goes on if its terminal is closed, or if what it says can be written nowhere.
    """
    from node.command_runner import configure_logging  # noqa: PLC0415  the help needs none of it
    from protocol.server.descriptors import warn_of_few_descriptors  # noqa: PLC0415

    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if isinstance(sys.stdout, CommandOutput):
        sys.stdout.is_optional = True
    console = configure_logging()
    warn_of_few_descriptors()
    return console
