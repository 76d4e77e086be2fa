"""'hetnode service': what it writes, what it tells systemd, and what it refuses."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from protocol.trust.invite import Invite
from tests.support.commands import PLAIN, run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="systemd is a service manager of Linux")

Hetnode = Callable[..., CompletedProcess[str]]

# Tests must not change the services of the user who runs them, so the tools are these.
TOOL = """#!/bin/sh
echo "$(basename "$0") $*" >> "$SAID"
case "$*" in
  *--property=Linger) echo Linger=no;;
  *enable*|*disable*) [ -z "$REFUSES" ] || { echo "no bus" >&2; exit 1; };;
esac
"""


@pytest.fixture
def hetnode(tmp_path: Path) -> Hetnode:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("systemctl", "loginctl"):
        (tools / name).write_text(TOOL)
        (tools / name).chmod(0o755)
    environment = {
        **os.environ,
        **PLAIN,
        "PATH": f"{tools}:{os.environ['PATH']}",
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "SAID": str(tmp_path / "said"),
    }

    def call(*arguments: str, **more: str) -> CompletedProcess[str]:
        return run("node.__main__", *arguments, environment={**environment, **more}, folder=tmp_path)

    credentials = tmp_path / "config" / "hetnode" / "peer-0.runs" / "nano-1"
    credentials.mkdir(parents=True)
    (credentials.parent.with_suffix(".key")).touch()
    (credentials / "certificate.pem").touch()
    return call


def test_a_service_is_installed_and_removed(hetnode: Hetnode, tmp_path: Path) -> None:
    done = hetnode("service", "install", "nano", "--hours", "22:00-07:00", "--drain-seconds", "60")
    assert done.returncode == 0, done.stderr
    assert "loginctl enable-linger" in done.stdout
    assert "systemctl --user status hetnode-nano-1\n" in done.stdout
    file = tmp_path / "config" / "systemd" / "user" / "hetnode-nano-1.service"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    text = file.read_text()
    assert f'"{sys.executable}" "-P" "-m" "node" "join" "nano-1" "--hours" "22:00-07:00"' in text
    assert "TimeoutStopSec=90" in text
    assert f"WorkingDirectory={tmp_path}" in text
    assert hetnode("service", "uninstall", "nano-1").returncode == 0
    assert not file.exists()
    said = (tmp_path / "said").read_text().splitlines()
    assert [line for line in said if "show" not in line] == [
        "systemctl --user daemon-reload",
        "systemctl --user enable --now hetnode-nano-1.service",
        "systemctl --user disable --now hetnode-nano-1.service",
        "systemctl --user daemon-reload",
    ]


def test_what_cannot_be_a_service_is_refused(hetnode: Hetnode, tmp_path: Path) -> None:
    secret = Invite("h:1", "h:2", bytes(32), "00" * 6, bytes(16)).encode()
    for arguments, status, code in (
        (("install", secret), 2, "bad-option"),
        (("install", "nano-1", "--invite-file", "x"), 2, "bad-option"),
        (("install", "nano-2"), 7, "no-credentials"),
        (("install", "nano-1", "--no-such-option"), 2, "No such option"),
        (("install", "nano-1", "--hours", "x"), 2, "bad-option"),
        (("uninstall",), 2, "bad-option"),
        (("uninstall", "nano-1"), 2, "bad-option"),
    ):
        done = hetnode("service", *arguments)
        assert (done.returncode, code in done.stderr) == (status, True), done.stderr
    assert not (tmp_path / "config" / "systemd").exists()


def test_a_service_manager_that_refuses_is_named(hetnode: Hetnode, tmp_path: Path) -> None:
    """What was written is removed again, at an install and at an uninstall."""
    done = hetnode("service", "install", "nano-1", REFUSES="1")
    assert done.returncode == 7
    assert "service-failed" in done.stderr
    assert "no bus" in done.stderr
    units = tmp_path / "config" / "systemd" / "user"
    assert not list(units.iterdir())
    assert hetnode("service", "install", "nano-1").returncode == 0
    (units / "default.target.wants").mkdir()
    (units / "default.target.wants" / "hetnode-nano-1.service").symlink_to("../hetnode-nano-1.service")
    assert hetnode("service", "uninstall", "nano", REFUSES="1").returncode == 7
    assert [each.name for each in units.rglob("*")] == ["default.target.wants"]
