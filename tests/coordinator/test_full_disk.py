"""A coordinator whose disk fills up: real processes on a real, small file system."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NoReturn

import pytest

from tests.support.commands import hetnode
from tests.support.paths import ROOT
from tests.support.waiting import wait_until

_SECONDS = 60.0


def _write_on(file: IO[bytes]) -> NoReturn:
    while file.write(bytes(4096)) == 4096:
        pass
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class SmallDisk:
    """A file system of 6 MB, which only the processes see that are started in it. Needs root."""

    def __init__(self, root: Path) -> None:
        script = f"mount -t tmpfs -o size=6m tmpfs '{root}' && echo mounted && exec cat"
        self._holder = subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == b"mounted\n"
        self.seen = Path(f"/proc/{self._holder.pid}/root{root}")

    def start(self, log: Path, *arguments: str) -> subprocess.Popen[bytes]:
        enter = ["nsenter", f"--mount=/proc/{self._holder.pid}/ns/mnt", f"--wd={ROOT}"]
        with log.open("ab") as output:
            command = [*enter, sys.executable, "-m", "node", *arguments]
            return subprocess.Popen(command, stdout=output, stderr=output, cwd=ROOT)

    def fill(self) -> None:
        ballast = (self.seen / "ballast").open("ab", buffering=0)
        with ballast, pytest.raises(OSError, match="No space left"):
            _write_on(ballast)

    def free(self) -> None:
        (self.seen / "ballast").unlink()

    def close(self) -> None:
        self._holder.communicate()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    if not shutil.which("nsenter") or subprocess.run(["unshare", "--mount", "true"], check=False).returncode:
        pytest.skip("this user may not mount file systems")
    (tmp_path / "disk").mkdir()
    small = SmallDisk(tmp_path / "disk")
    yield small
    small.close()


@pytest.mark.swarm
def test_a_full_disk_pauses_a_coordinator_which_goes_on_by_itself_also_after_its_death(
    disk: SmallDisk, tmp_path: Path
) -> None:
    log, seen = tmp_path / "log", disk.seen / "run"
    options = "coordinator", "--folder", str(tmp_path / "disk/run"), "--listen", "127.0.0.1:0"
    only = "--relay", "none", "--dashboard", "none"

    def cause() -> str:
        told = hetnode("status", str(seen), "--json")
        return str(json.loads(told.stdout)["cause"]["code"]) if told.returncode == 0 else told.stderr

    def invited() -> bool:
        return hetnode("invite", "create", "--folder", str(seen)).returncode == 0

    process = disk.start(log, *options, *only, "--rounds", "7")
    try:
        wait_until((seen / "address").exists, _SECONDS, log.read_text)
        disk.fill()
        assert not invited()
        assert cause() == "disk-full"
        assert process.poll() is None
        disk.free()
        wait_until(lambda: cause() == "peers-lacking", _SECONDS, log.read_text)
        assert invited()
        assert "[disk-full]" in log.read_text()
        assert "store-corrupt" not in log.read_text()

        disk.fill()
        assert not invited()
        process.send_signal(signal.SIGKILL)
        process.wait()
        # What a crash has left of small files, as they were written by an older version.
        for name in ("run.toml", "dht-port", "address"):
            os.truncate(seen / name, 0)
        written = log.stat().st_size
        process = disk.start(log, *options, *only)
        wait_until(lambda: "[disk-full]" in log.read_text()[written:], _SECONDS, log.read_text)
        assert process.poll() is None
        disk.free()
        wait_until(lambda: (seen / "address").exists() and invited(), _SECONDS, log.read_text)
        assert "rounds = 7" in (seen / "run.toml").read_text()
        assert (seen / "dht-port").read_text()
    finally:
        process.terminate()
        process.wait(_SECONDS)
