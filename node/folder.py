"""A node's folder: whose it is while a node runs, and of which run what is kept there."""

from __future__ import annotations

import fcntl
import logging
import tempfile
from itertools import count
from pathlib import Path
from typing import IO

from protocol.errors import ErrorCode, HetnodeError

log = logging.getLogger(__name__)

_KEPT = ("checkpoint", "payloads")


def usable(folder: Path, option: str = "--folder", mode: int = 0o777) -> Path:
    """`folder`, made and found writable: what a disk refuses is better said before the work than after it.

    Raises HetnodeError BAD_OPTION, which names the `option` that it was given with.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=mode)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise HetnodeError(
            ErrorCode.BAD_OPTION,
            f"{option} {folder} cannot be written: {error.strerror or error}.",
            "Give another folder.",
        ) from None


def locked(folder: Path) -> IO[str]:
    """A lock that keeps other nodes out of `folder` while it is open. Raises RUN_FOLDER_IN_USE."""
    lock = (folder / "lock").open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise HetnodeError(
            ErrorCode.RUN_FOLDER_IN_USE,
            f"Another node keeps its checkpoints in {folder}.",
            "Give this one another --folder.",
        ) from None
    return lock


def settle_in(folder: Path, run: str, coordinator: str) -> Path:
    """`folder`, with nothing in it that is of another run.

    A coordinator that was set up anew (with another key, so another peer id) starts another run, even of the
    same specification: what is kept of the former one is not deleted, but is of no use here.
    """
    mark, name = folder / "run", f"{run} {coordinator}"
    former = mark.read_text() if mark.exists() else name
    if former != name:
        aside = next(path for n in count(1) if not (path := folder / f"former-{n}").exists())
        aside.mkdir()
        for kept in _KEPT:
            if (folder / kept).exists():
                (folder / kept).rename(aside / kept)
        log.warning("what was kept of run %s is now in %s", former.split()[0], aside)
    mark.write_text(name)
    return folder
