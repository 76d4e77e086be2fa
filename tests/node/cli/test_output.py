"""Commands print on terminals of any encoding, and say in one message if they cannot print."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from protocol.errors import ErrorCode, ExitCode
from tests.support.paths import ROOT

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


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
@pytest.mark.parametrize("arguments", [("spec", "show", "nano"), ("--help",)], ids=str)
def test_a_full_disk_is_one_message(arguments: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        done = command(*arguments, out=full.fileno())
    assert done.returncode == ExitCode.STATE
    assert ErrorCode.OUTPUT_UNWRITABLE.label in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
