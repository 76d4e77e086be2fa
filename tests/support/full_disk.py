"""Writes checkpoints where the disk refuses at different places: a process of its own for a test.

Arguments ``tmpfs|limit FOLDER``: mounts small file systems in a mount namespace of its own, so the mounts end
with it, or limits the size of files. Prints the error code of each attempt.
"""

from __future__ import annotations

import ctypes
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from node.checkpoint import node_checkpoint
from protocol.errors import HetnodeError
from tests.support.checkpoints import HOSTED, SPEC, assert_holds, sizes_to_try, write_checkpoint

_NEW_MOUNTS = 0x00020000  # CLONE_NEWNS of unshare(2)


def attempt(root: Path) -> str:
    """Write the next checkpoint below `root`, where there is one already; return how it failed."""
    try:
        write_checkpoint(root, 20)
    except HetnodeError as error:
        assert [path.name for path in root.iterdir()] == ["round-000010"], "nothing half-written is left"
        assert_holds(node_checkpoint.newest(root, SPEC, HOSTED), 10)
        return error.code.label
    return "written"


def on_small_disk(model: Path, mount: Path, free: int) -> str:
    mount.mkdir()
    options = f"size={disk_usage(model) + free // 4096 * 4096}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(mount)], check=True)
    try:
        shutil.copytree(model, mount, dirs_exist_ok=True)
        return attempt(mount)
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def disk_usage(folder: Path) -> int:
    """In whole pages, as a tmpfs counts."""
    return sum(-(-path.stat().st_size // 4096) * 4096 for path in folder.rglob("*") if path.is_file())


def with_small_files(model: Path, limit: int) -> str:
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        return attempt(model)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


def main() -> None:
    means, folder = sys.argv[1], Path(sys.argv[2])
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if means == "tmpfs":
        assert ctypes.CDLL(None).unshare(_NEW_MOUNTS) == 0
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    model = folder / "model"
    write_checkpoint(model, 10)
    for number, size in enumerate(sizes_to_try(model)):
        if means == "tmpfs":
            print(on_small_disk(model, folder / str(number), size))
        else:
            largest = max(path.stat().st_size for path in model.rglob("*"))
            print(with_small_files(model, min(size, largest - 1)))


if __name__ == "__main__":
    main()
