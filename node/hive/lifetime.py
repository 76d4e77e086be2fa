"""How hivemind's processes end: all together, and without leaving a socket file."""

from __future__ import annotations

import os
import shutil
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil

_POLL_SECONDS = 0.5


def end_with_parent(parent: int, folder: Path) -> None:
    """End this process, and remove `folder`, soon after its parent process `parent` has ended by any signal.

    Polls: PR_SET_PDEATHSIG fires when the thread that forked ends, so it is no substitute, and Linux only.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL_SECONDS)
        kill_descendants()
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def kill_descendants() -> None:
    """SIGKILL every process below this one, children before their parents, who can thus reap them.

    Where there is one (not on Linux, see the client's environment), torch's shared-memory manager is left to
    end by itself: it unlinks the shared memory that would otherwise stay.
    """
    for process in reversed(psutil.Process().children(recursive=True)):
        with suppress(psutil.Error):
            if process.name() != "torch_shm_manager":
                process.kill()
                process.wait(timeout=1.0)
