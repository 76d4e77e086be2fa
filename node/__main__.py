"""The start of ``hetnode`` and ``python -m node``."""

import signal

from node.ipc.init_process import continue_below_init


def main() -> None:
    continue_below_init()
    # Until the command has its own handlers, Ctrl-C ends the process at once. A KeyboardInterrupt in the
    # middle of an import would print a useless traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from node.cli.main import main as run  # noqa: PLC0415

    run()


if __name__ == "__main__":
    main()
