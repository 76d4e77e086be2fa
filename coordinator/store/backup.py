"""A copy of a coordinator's folder, taken while the coordinator runs, from which its run can go on."""

from __future__ import annotations

import os
import shutil
import stat
from contextlib import closing
from pathlib import Path

from coordinator.store.log_copy import LOG_FILE, verified_copy
from protocol.types import PeerId

_HISTORY = "history.sqlite"  # the next start writes it from the log
_SUFFIXES = ("-wal", "-shm", "-journal")


def back_up(folder: Path, out: Path, coordinator: PeerId) -> None:
    """Copy what the coordinator in `folder` needs to go on: its log, verified, its keys and small files.

    `out` appears whole or not at all, and can be read by its owner alone: keys are in it.

    Args:
        out: does not exist, and its parent does.
        coordinator: its peer id; the head of the log must have its signature.

    Raises:
        HetnodeError: STORE_CORRUPT.
        OSError: `out` exists or cannot be written.
    """
    if out.exists():
        raise FileExistsError(17, "it exists", str(out))
    new = out.with_name(f"{out.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(mode=0o700)
    try:
        with closing(verified_copy(folder, new, coordinator)[1]):
            pass  # closing puts the rows of the second file into the first one
        for file in sorted(folder.iterdir()):
            if _is_kept(file):
                shutil.copy2(file, new / file.name)
        for file in new.iterdir():
            with file.open("rb") as written:
                os.fsync(written.fileno())
        new.rename(out)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise


def _is_kept(file: Path) -> bool:
    database = file.name
    for suffix in _SUFFIXES:
        database = database.removesuffix(suffix)
    is_log = database == LOG_FILE or file.name == f"{Path(LOG_FILE).stem}.head"
    return stat.S_ISREG(file.lstat().st_mode) and not is_log and database != _HISTORY
