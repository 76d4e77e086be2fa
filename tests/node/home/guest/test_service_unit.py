"""Services: their exact text, what must be quoted in it, and that systemd reads it."""

from __future__ import annotations

import plistlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from node.home.guest.service_unit import Service, launchd_agent, systemd_unit
from protocol.errors import ErrorCode, HetnodeError
from tests.support.paths import ROOT

SERVICE = Service(
    "nano-bbe1c132be18",
    (
        "/opt/python 3",
        "-m",
        "node",
        "join",
        "nano-bbe1c132be18",
        "--folder",
        '/a "b" $c 50%\\',
    ),
    Path("/home/someone/100% mine"),
    120.0,
    {"XDG_DATA_HOME": "/data/$a b", "CUDA_VISIBLE_DEVICES": "1"},
)

UNIT = r"""[Unit]
Description=hetnode trains in nano-bbe1c132be18
StartLimitIntervalSec=0

[Service]
Type=exec
ExecStart=/usr/bin/env "/opt/python 3" "-m" "node" "join" "nano-bbe1c132be18" "--folder" "/a \"b\" $$c 50%%\\"
WorkingDirectory=/home/someone/100%% mine
Environment="CUDA_VISIBLE_DEVICES=1"
Environment="XDG_DATA_HOME=/data/$a b"
Restart=on-failure
RestartSec=30
RestartPreventExitStatus=2 5
SuccessExitStatus=130
KillMode=mixed
TimeoutStopSec=150
UMask=0077
NoNewPrivileges=yes

[Install]
WantedBy=default.target
"""


def test_the_unit_of_systemd_is_this_text() -> None:
    assert systemd_unit(SERVICE) == UNIT
    assert SERVICE.name == "hetnode-nano-bbe1c132be18"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_reads_the_unit(tmp_path: Path) -> None:
    folder = tmp_path / 'a "b" 50%'
    folder.mkdir()
    program = folder / "python"
    program.symlink_to(sys.executable)
    service = Service("run", (str(program), "-m", "node", "join", "run"), folder, 5.0, {"A": "b c"})
    file = tmp_path / f"{service.name}.service"
    file.write_text(systemd_unit(service))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(file)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert service.name not in done.stderr, done.stderr


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_reads_the_unit_of_a_coordinator(tmp_path: Path) -> None:
    text = (ROOT / "docker" / "hetnode-coordinator.service").read_text()
    assert "/usr/local/bin/hetnode" in text
    file = tmp_path / "hetnode-coordinator.service"
    file.write_text(text.replace("/usr/local/bin/hetnode", sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(file)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, file.name in done.stderr) == (0, False), done.stderr


def test_the_agent_of_launchd_says_the_same() -> None:
    read = plistlib.loads(launchd_agent(SERVICE))
    assert read["Label"] == SERVICE.name
    assert read["ProgramArguments"] == list(SERVICE.command)
    assert read["WorkingDirectory"] == str(SERVICE.folder)
    assert read["EnvironmentVariables"] == SERVICE.environment
    assert read["RunAtLoad"] is True
    assert read["KeepAlive"] == {"SuccessfulExit": False}
    assert read["ExitTimeOut"] == 150


@pytest.mark.parametrize("text", ["a\nExecStartPost=evil", "a\0b", "a\x7fb"])
def test_a_control_character_is_refused(text: str) -> None:
    with pytest.raises(HetnodeError) as refused:
        Service("run", ("python", text), Path("/"), 1.0)
    assert refused.value.code is ErrorCode.BAD_OPTION


def test_the_name_of_a_service_is_a_file_name() -> None:
    assert Service("/home/a b/nano-1.2", (), Path("/"), 1.0).name == "hetnode-nano-1-2"
    beside = [Service(f"/home/a b/peer-{n}.runs/nano-1.2", (), Path("/"), 1.0).name for n in (0, 1)]
    assert beside == ["hetnode-nano-1-2-peer-0", "hetnode-nano-1-2-peer-1"]
    assert Service("..", (), Path("/"), 1.0).name == "hetnode-node"
