"""The start of ``hetnode`` and ``python -m node``."""

import os
import signal

from node.ipc.init_process import continue_below_init


def _interrupt(*_: object) -> None:
    os.write(2, b"interrupted\n")
    os._exit(130)  # as ExitCode.INTERRUPTED


def main() -> None:
    continue_below_init()
    # Until the command has its own handlers, Ctrl-C ends the process at once. A KeyboardInterrupt in the
    # middle of an import would print a useless traceback.
    signal.signal(signal.SIGINT, _interrupt)
    from node.cli.main import main as run  # noqa: PLC0415

    run()


if __name__ == "__main__":
    main()
