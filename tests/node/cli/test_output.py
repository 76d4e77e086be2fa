"""Commands print on terminals of any encoding, and say in one message if they cannot print."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from node.ipc.template import ForkedProcess
from protocol.errors import ErrorCode, ExitCode
from tests.support.commands import hetnode, template
from tests.support.paths import ROOT
from tests.support.waiting import wait_until

ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def command(
    *arguments: str, out: int = subprocess.PIPE, **environment: str
) -> subprocess.CompletedProcess[str]:
    everything = {**os.environ, **environment, "PYTHONPATH": str(ROOT), "COLUMNS": "80"}
    return subprocess.run(
        [sys.executable, "-m", "node", *arguments],
        check=False,
        stdout=out,
        stderr=subprocess.PIPE,
        env=everything,
        encoding="latin-1",
    )


@pytest.mark.parametrize(
    "environment", [ASCII, {"PYTHONIOENCODING": "ascii"}, {"PYTHONIOENCODING": "latin-1"}], ids=str
)
@pytest.mark.parametrize("arguments", [("spec", "show", "nano"), ("plan", "--replicas", "2")], ids=str)
def test_any_encoding_can_be_printed(arguments: tuple[str, ...], environment: dict[str, str]) -> None:
    done = command(*arguments, **environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert "Traceback" not in done.stderr


def test_a_command_without_standard_output_ends_well() -> None:
    shell = f"exec {sys.executable} -m node spec show nano >&-"
    done = subprocess.run(["sh", "-c", shell], check=False, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "arguments", [("--help",), ("spec", "show", "nano"), ("plan", "--replicas", "2", "--json")], ids=str
)
def test_a_reader_that_is_gone_ends_a_command_in_silence(arguments: tuple[str, ...]) -> None:
    """As one that reads nothing, or has read enough before the end."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        assert command(*arguments, out=writer).stderr == ""
    finally:
        os.close(writer)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
@pytest.mark.parametrize("arguments", [("spec", "show", "nano"), ("--help",)], ids=str)
def test_a_full_disk_is_one_message(arguments: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        done = command(*arguments, out=full.fileno())
    assert done.returncode == ExitCode.STATE
    assert ErrorCode.OUTPUT_UNWRITABLE.label in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def coordinator(folder: Path, out: int, errors: int) -> ForkedProcess:
    options = ("--preset", "nano", "--listen", "127.0.0.1:0", "--dashboard", "none", "--relay", "none")
    started = ["coordinator", *options, "--folder", str(folder)]
    return template().fork("node.__main__", started, stdout=out, stderr=errors, with_template=True)


def read_until(terminal: int, text: bytes) -> None:
    read = b""
    while text not in read:
        assert select.select([terminal], [], [], 60)[0], read.decode()
        read += os.read(terminal, 1 << 16)


def test_coordinator_and_node_outlive_their_terminal(tmp_path: Path) -> None:
    """They may write to it afterwards, and end in order when they are asked to."""
    (ours, theirs), run = pty.openpty(), tmp_path / "run"
    started = [coordinator(run, theirs, theirs)]
    try:
        read_until(ours, b"invite create")
        hetnode("invite", "create", "--folder", str(run), "--out", str(tmp_path / "invite"), check=True)
        own = ("--identity", str(tmp_path / "key"), "--folder", str(tmp_path / "node"), "--role", "replica")
        here = ("--device", "cpu", "--listen", "127.0.0.1:0", "--advertise", "127.0.0.1", "--no-measure")
        joining = ["join", str(tmp_path / "invite"), "--yes", *own, *here]
        started.append(
            template().fork("node.__main__", joining, stdout=theirs, stderr=theirs, with_template=True)
        )
        read_until(ours, b"joined")
        os.close(theirs)
        os.close(ours)
        for process in started:
            process.send_signal(signal.SIGHUP)
        assert "more full replica" not in hetnode("status", str(run), check=True).stdout
        for process, status in zip(reversed(started), (0, ExitCode.INTERRUPTED), strict=True):
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == status
    finally:
        for process in started:
            process.kill()


def test_a_coordinator_goes_on_without_standard_streams(tmp_path: Path) -> None:
    options = "--preset nano --listen 127.0.0.1:0 --dashboard none --relay none"
    shell = f"exec {sys.executable} -m node coordinator {options} --folder {tmp_path}/run <&- >&- 2>&-"
    with subprocess.Popen(["sh", "-c", shell], cwd=ROOT) as process:
        try:
            wait_until((tmp_path / "run" / "address").exists, 60, "the coordinator listens")
            numbers = (Path(f"/proc/{process.pid}/fd/{number}").resolve() for number in range(3))
            assert {*numbers} == {Path("/dev/null")}
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == ExitCode.INTERRUPTED
        finally:
            process.kill()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
@pytest.mark.parametrize("places", [lambda full: (full, 2), lambda full: (full, full)], ids=["out", "all"])
def test_a_coordinator_goes_on_where_nothing_can_be_written(
    tmp_path: Path, places: Callable[[int], tuple[int, int]]
) -> None:
    with open("/dev/full", "w") as full:
        process = coordinator(tmp_path / "run", *places(full.fileno()))
    try:
        wait_until((tmp_path / "run" / "address").exists, 60, "the coordinator listens")
        hetnode("status", str(tmp_path / "run"), check=True)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == ExitCode.INTERRUPTED
    finally:
        process.kill()
