"""The start of ``hetnode`` and ``python -m node``."""

import os
import signal
import sys
from contextlib import suppress

from node.ipc.init_process import continue_below_init


def _interrupt(*_: object) -> None:
    with suppress(OSError):  # its terminal is closed, or its disk full
        os.write(2, b"interrupted\n")
    os._exit(130)  # as ExitCode.INTERRUPTED


def _open_closed_streams() -> None:
    """Give a process that was started without standard streams empty ones.

    Else a file or socket would get their numbers, and with those what other code prints.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            place = os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
            os.set_inheritable(place, True)
            setattr(sys, name, os.fdopen(place, "w" if number else "r", closefd=False))


def main() -> None:
    _open_closed_streams()
    continue_below_init()
    # Until the command has its own handlers, Ctrl-C ends the process at once. A KeyboardInterrupt in the
    # middle of an import would print a useless traceback.
    signal.signal(signal.SIGINT, _interrupt)
    from node.cli.main import main as run  # noqa: PLC0415

    run()


if __name__ == "__main__":
    main()
