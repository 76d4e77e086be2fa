"""Standard output as it is: any encoding, and perhaps on a disk that is full."""

from __future__ import annotations

import errno
import io
import os
import sys
from traceback import format_exception
from types import TracebackType

from protocol.errors import ErrorCode, HetnodeError
from protocol.server.terminal import visible


class CommandOutput(io.TextIOWrapper):
    """Standard output of a command. Characters that its encoding does not have become question marks.

    Raises HetnodeError OUTPUT_UNWRITABLE for what cannot be written; a reader that is gone, as after
    ``| head``, stays a BrokenPipeError, which ends a command in silence.
    """

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError as error:
            raise self._failure(error) from None

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            raise self._failure(error) from None

    def _failure(self, error: OSError) -> Exception:
        if error.errno == errno.EPIPE:
            return error
        # Python would write what is left at its end, and fail again with a message of its own.
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
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
    """Use :class:`CommandOutput` in this process; standard error gets question marks, too."""
    out = sys.stdout
    if isinstance(out, io.TextIOWrapper):
        sys.stdout = CommandOutput(
            out.buffer, encoding=out.encoding, errors="replace", line_buffering=out.line_buffering
        )
    sys.excepthook = _show_failure
    if isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr.reconfigure(errors="replace")
