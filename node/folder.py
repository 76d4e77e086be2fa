"""A node's folder: whose it is while a node runs, and of which run what is kept there."""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
from itertools import count
from pathlib import Path
from typing import IO

from protocol.errors import ErrorCode, HetnodeError
from protocol.types import StageRange

log = logging.getLogger(__name__)

_KEPT = ("checkpoint", "payloads")
_LOCK, _RUN, _STAGES, _NOTE = "lock", "run", "stages", "node-folder"


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
    """A lock that keeps other nodes out of `folder` while it is open. Raises RUN_FOLDER_IN_USE.

    Its file names this process, for :func:`runner_of`.
    """
    lock = (folder / _LOCK).open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise HetnodeError(
            ErrorCode.RUN_FOLDER_IN_USE,
            f"Another node keeps its checkpoints in {folder}.",
            "Give this one another --folder.",
        ) from None
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    return lock


def runner_of(folder: Path) -> int | None:
    """The process id of the node that keeps `folder` now; None where none does."""
    try:
        with (folder / _LOCK).open() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return int(lock.read())
    except (OSError, ValueError):  # never locked; or locked this very moment, and not named yet
        pass
    return None


def note_folder(credentials: Path, folder: Path) -> None:
    """Note next to a node's credentials where it keeps its checkpoints."""
    (credentials / _NOTE).write_text(str(folder.absolute()))


def noted_folder(credentials: Path) -> Path | None:
    """Where the node with these credentials was last; None where it never ran."""
    note = credentials / _NOTE
    return Path(note.read_text()) if note.exists() else None


def run_kept_in(folder: Path) -> str:
    """The name of the run of which `folder` holds something; "" where it holds none."""
    mark = folder / _RUN
    return mark.read_text().partition(" ")[0] if mark.exists() else ""


def settle_in(folder: Path, run: str, coordinator: str) -> Path:
    """`folder`, with nothing in it that is of another run.

    A coordinator that was set up anew (with another key, so another peer id) starts another run, even of the
    same specification: what is kept of the former one is not deleted, but is of no use here.
    """
    mark, name = folder / _RUN, f"{run} {coordinator}"
    former = mark.read_text() if mark.exists() else name
    if former != name:
        aside = next(path for n in count(1) if not (path := folder / f"former-{n}").exists())
        aside.mkdir()
        for kept in (*_KEPT, _STAGES, *(path.name for path in folder.glob(f"{_STAGES}-*"))):
            if (folder / kept).exists():
                (folder / kept).rename(aside / kept)
        log.warning("what was kept of run %s is now in %s", former.split()[0], aside)
    mark.write_text(name)
    return folder


def settle_stages(folder: Path, stages: StageRange) -> None:
    """Let what lies in `folder` be that of `stages`: what is kept of other stages is set aside, below a
    folder with their name, and what was set aside of these comes back.
    """
    mark = folder / _STAGES
    former = mark.read_text() if mark.exists() else str(stages)
    mark.write_text(str(stages))
    if former != str(stages):
        aside, before = folder / f"{_STAGES}-{former}", folder / f"{_STAGES}-{stages}"
        aside.mkdir(exist_ok=True)
        before.mkdir(exist_ok=True)
        for kept in _KEPT:
            for source, target in ((folder / kept, aside / kept), (before / kept, folder / kept)):
                if source.exists() and not target.exists():
                    source.rename(target)
