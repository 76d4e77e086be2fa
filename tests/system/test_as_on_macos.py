"""Commands and a swarm without anything that only Linux has (tests/support/as_on_macos)."""

from __future__ import annotations

import os
import plistlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.commands import PLAIN
from tests.support.paths import ROOT

SITE = ROOT / "tests" / "support" / "as_on_macos"
Hetnode = Callable[..., subprocess.CompletedProcess[str]]

TOOL = """#!/bin/sh
echo "$(basename "$0") $*" >> "$SAID"
"""

WHAT_IS_THERE = """
import asyncio, os, signal
from node.home.router.gateway import default_gateway
from node.measure.hardware import available_threads, processor
print(hasattr(os, "pidfd_open"), hasattr(signal, "pidfd_send_signal"), hasattr(os, "sched_getaffinity"))
print(asyncio.run(default_gateway()), available_threads() > 0, bool(processor()))
"""


@pytest.fixture
def hetnode(tmp_path: Path) -> Hetnode:
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "launchctl").write_text(TOOL)
    (tools / "launchctl").chmod(0o755)
    environment = {
        **os.environ,
        **PLAIN,
        "HOME": str(tmp_path),
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHONPATH": f"{SITE}{os.pathsep}{ROOT}",
        "SAID": str(tmp_path / "said"),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
    }

    def call(*arguments: str, start: tuple[str, str] = ("-m", "node")) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *start, *arguments]
        return subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
        )

    return call


def test_what_only_linux_has_is_not_there(hetnode: Hetnode) -> None:
    done = hetnode(start=("-c", WHAT_IS_THERE))
    assert done.stdout.split() == ["False", "False", "False", "None", "True", "True"], done.stderr


@pytest.mark.slow
def test_a_machine_is_examined(hetnode: Hetnode) -> None:
    """With its worker, which is a new interpreter there: nothing is forked that has torch."""
    done = hetnode("doctor", "--device", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "GFLOP/s in training" in done.stdout


def test_a_service_of_launchd_is_installed_and_removed(hetnode: Hetnode, tmp_path: Path) -> None:
    credentials = tmp_path / "config" / "hetnode" / "peer-0.runs" / "nano-1"
    credentials.mkdir(parents=True)
    credentials.parent.with_suffix(".key").touch()
    (credentials / "certificate.pem").touch()
    done = hetnode("service", "install", "nano", "--hours", "22:00-07:00")
    assert done.returncode == 0, done.stderr
    file = tmp_path / "Library" / "LaunchAgents" / "hetnode-nano-1.plist"
    read = plistlib.loads(file.read_bytes())
    assert read["ProgramArguments"][-4:] == ["join", "nano-1", "--hours", "22:00-07:00"]
    assert hetnode("service", "uninstall").returncode == 0
    assert not file.exists()
    domain = f"gui/{os.getuid()}"
    assert f"launchctl print {domain}/hetnode-nano-1\n" in done.stdout
    assert (tmp_path / "said").read_text().splitlines() == [
        f"launchctl bootstrap {domain} {file}",
        f"launchctl bootout {domain} {file}",
    ]


@pytest.mark.slow
def test_a_whole_swarm_trains(hetnode: Hetnode, tmp_path: Path) -> None:
    done = hetnode("swarm", "up", "--preset", "nano", "--rounds", "2", "--folder", "run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 committed, 0 aborted" in done.stdout
    assert (tmp_path / "run" / "checkpoint").exists()
