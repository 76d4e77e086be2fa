"""A node's folder: whose it is while a node runs, and of which run what is kept there."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import shutil
import struct
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import IO

from protocol.errors import ErrorCode, HetnodeError
from protocol.trust.private_file import without_locks, write_whole
from protocol.types import StageRange

log = logging.getLogger(__name__)

_KEPT = ("checkpoint", "payloads")
_LOCK, _RUN, _STAGES, _NOTE, _FINISHED = "lock", "run", "stages", "node-folder", "finished"
_AGREED = "agreed"
_KEPT_ASIDE = 2
# The C structure of a POSIX lock: start, length, process, kind, whence; elsewhere kind and whence come first.
_FLOCK, _KIND, _PROCESS = (
    (struct.Struct("qqihh"), 3, 2) if sys.platform == "darwin" else (struct.Struct("hhqqi0q"), 0, 4)
)


def make_usable(folder: Path, option: str = "--folder", mode: int = 0o777) -> Path:
    """Make `folder` and check that it is writable. Raises BAD_OPTION, which names the `option`."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=mode)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise _unwritable(f"{option} {folder}", error, "Give another folder.") from None


@contextmanager
def disk_errors_reported(folder: Path) -> Iterator[None]:
    """An OSError inside the block becomes BAD_OPTION, which names `folder`."""
    try:
        yield
    except OSError as error:
        raise _unwritable(str(folder), error, "Name a folder that this user can write.") from None


def _unwritable(place: str, error: OSError, remedy: str) -> HetnodeError:
    cause = f"{place} cannot be written: {error.strerror or error}."
    return HetnodeError(ErrorCode.BAD_OPTION, cause, remedy)


def lock_folder(folder: Path) -> IO[str]:
    """A lock that keeps other nodes out of `folder` while it is open. Raises RUN_FOLDER_IN_USE, BAD_OPTION.

    The process must not open the file again: closing that second handle would release the lock.
    """
    lock = (folder / _LOCK).open("a")
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise without_locks(folder, error) from None
        raise HetnodeError(
            ErrorCode.RUN_FOLDER_IN_USE,
            f"Another node keeps its checkpoints in {folder}.",
            "Give this one another --folder.",
        ) from None
    return lock


def running_process(folder: Path) -> int | None:
    """The process that has locked `folder`; None if there is none, or it is this process.

    0 stands for a process that cannot be seen from here, as in another container.
    """
    try:
        with (folder / _LOCK).open() as lock:
            asked = [0] * 5
            asked[_KIND] = fcntl.F_WRLCK
            found = _FLOCK.unpack(fcntl.fcntl(lock, fcntl.F_GETLK, _FLOCK.pack(*asked)))
    except OSError:  # never lock_folder
        return None
    return None if found[_KIND] == fcntl.F_UNLCK else max(0, found[_PROCESS])


def remember_node_folder(credentials: Path, folder: Path) -> None:
    """Note next to a node's credentials where it keeps its checkpoints."""
    write_whole(credentials / _NOTE, str(folder.absolute()))


def node_folder_of(credentials: Path) -> Path | None:
    """Where the node with these credentials was last; None where it never ran."""
    note = credentials / _NOTE
    return Path(named) if (named := _read(note)) else None


def remember_finished(credentials: Path, finished: bool) -> None:
    """Note next to a node's credentials whether their run was finished while the node took part.

    A join that succeeds takes it back: the operator may have restored an older folder of the coordinator.
    """
    note = credentials / _FINISHED
    if finished:
        note.touch()
    else:
        note.unlink(missing_ok=True)


def was_finished(credentials: Path) -> bool:
    """Whether the run of these credentials was finished when the node left it."""
    return (credentials / _FINISHED).exists()


def remember_agreed(folder: Path, run: str, spec_hash: str) -> None:
    """Note that this machine's owner was told what `run` does here, with the specification of this hash."""
    others = [line for line in _agreements(folder) if not line.startswith(f"{run} ")]
    write_whole(folder / _AGREED, "".join(f"{line}\n" for line in [*others, f"{run} {spec_hash}"]))


def agreed_spec(folder: Path, run: str) -> str:
    """The hash of the specification that was noted for `run`; "" where none was."""
    return next((line.partition(" ")[2] for line in _agreements(folder) if line.startswith(f"{run} ")), "")


def _agreements(folder: Path) -> list[str]:
    note = folder / _AGREED
    return note.read_text(errors="replace").splitlines() if note.exists() else []


def run_in(folder: Path) -> str:
    """The name of the run of which `folder` holds something; "" where it holds none."""
    mark = folder / _RUN
    return _read(mark).partition(" ")[0]


def keep_only_run(folder: Path, run: str, coordinator: str) -> Path:
    """`folder`, in which the files of another run have been moved aside.

    A coordinator with another key starts another run, even of the same specification.
    """
    mark, name = folder / _RUN, f"{run} {coordinator}"
    former = _read(mark) or name
    if former != name:
        aside = next(path for n in count(1) if not (path := folder / f"former-{n}").exists())
        aside.mkdir()
        for kept in (*_KEPT, _STAGES, *(path.name for path in folder.glob(f"{_STAGES}-*"))):
            if (folder / kept).exists():
                (folder / kept).rename(aside / kept)
        log.warning("what was kept of run %s is now in %s", former.split()[0], aside)
    write_whole(mark, name)
    return folder


def keep_only_stages(folder: Path, stages: StageRange) -> None:
    """Move aside the files in `folder` if they are of other stages, and bring back those of `stages`.

    The newest that were moved aside are kept. If some stages stay, all files stay: this node may be the only
    one that has their state.
    """
    mark = folder / _STAGES
    former = found if re.fullmatch(r"\d+(-\d+)?", found := _read(mark)) else str(stages)
    write_whole(mark, str(stages))
    if set(_numbers(former)).isdisjoint(stages):
        aside, before = folder / f"{_STAGES}-{former}", folder / f"{_STAGES}-{stages}"
        aside.mkdir(exist_ok=True)
        for kept in _KEPT:
            for source, target in ((folder / kept, aside / kept), (before / kept, folder / kept)):
                if source.exists() and not target.exists():
                    source.rename(target)
        os.utime(aside)  # the newest, whatever was there to be set aside
        with suppress(OSError):  # not there; or something of it could not come back
            before.rmdir()
        by_age = sorted(folder.glob(f"{_STAGES}-*"), key=lambda path: path.stat().st_mtime_ns)
        for old in by_age[:-_KEPT_ASIDE]:
            shutil.rmtree(old, ignore_errors=True)


def _read(mark: Path) -> str:
    """The content of a small file; "" where there is none, or a crash has left none."""
    return mark.read_text(errors="replace").strip() if mark.is_file() else ""


def _numbers(stages: str) -> range:
    """The stages in the text of a range, such as "1" or "0-3"."""
    first, _, last = stages.partition("-")
    return range(int(first), int(last or first) + 1)
