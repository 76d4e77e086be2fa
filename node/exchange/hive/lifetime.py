"""Ends hivemind's processes together, and removes their socket files."""

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
    """End this process and remove `folder` soon after the process `parent` has ended, by any signal.

    It polls. PR_SET_PDEATHSIG would fire when the forking thread ends, and exists only on Linux.
    """

    def watch() -> None:
        while os.getppid() == parent:  # an orphan gets another parent
            time.sleep(_POLL_SECONDS)
        kill_descendants()
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)  # sys.exit would end only this thread

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def kill_descendants() -> None:
    """SIGKILL every process below this one, children before their parents, so that a parent can reap them.

    torch's shared-memory manager (it does not run on Linux) ends by itself: it still has to unlink the shared
    memory.
    """
    for process in reversed(psutil.Process().children(recursive=True)):
        with suppress(psutil.Error):
            if process.name() != "torch_shm_manager":
                process.kill()
                process.wait(timeout=1.0)  # so that none is left when this returns
