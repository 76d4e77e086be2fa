"""Ends what tests have started when the process of the tests ends, by any signal (Linux).

What a test starts has the mark of its test process in its environment, and so has what that starts in turn. A
small process waits for the end of the test process, and then kills all processes with its mark. A template
process alone would stay with the swarm that it has forked (node.ipc.template_server).
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

VARIABLE = "MARK_OF_TESTS"
"""In the environment of all that tests start. Its name must not be that of a setting of hetnode."""
_MOST_PASSES, _PASS_SECONDS = 100, 0.1


def start() -> subprocess.Popen[bytes] | None:
    """Mark what this process starts from now on, and have it killed when this process has ended.

    Returns the process that does it, to be kept; None on other systems than Linux.
    """
    if sys.platform != "linux":
        return None
    os.environ[VARIABLE] = mark = uuid.uuid4().hex
    return subprocess.Popen(
        # Isolated and without site: it needs a few milliseconds, and nothing of the tree.
        [sys.executable, "-I", "-S", __file__, str(os.getpid()), mark],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={},
        start_new_session=True,  # a signal to all processes of the terminal must not end it
    )


def _wait_for_end(pid: int) -> None:
    with suppress(ProcessLookupError):
        select.select([os.pidfd_open(pid)], [], [])


def _marked(entry: bytes) -> Iterator[int]:
    """Processes whose environment contains `entry`. Those that have ended have none."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with suppress(OSError):
                if entry in (folder / "environ").read_bytes().split(b"\0"):
                    yield int(folder.name)


def main() -> None:
    pid, mark = sys.argv[1:]
    _wait_for_end(int(pid))
    # Again, because a process may start another one meanwhile.
    for _ in range(_MOST_PASSES):
        found = list(_marked(f"{VARIABLE}={mark}".encode()))
        if not found:
            return
        for each in found:
            with suppress(OSError):
                os.kill(each, signal.SIGKILL)
        time.sleep(_PASS_SECONDS)


if __name__ == "__main__":
    main()
