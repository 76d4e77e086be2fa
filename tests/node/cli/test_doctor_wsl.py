"""What doctor says inside Windows; the files are those that WSL shows."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from node.cli.doctor_checks import CheckResult, Severity
from node.cli.doctor_wsl import Windows, check_wsl, file_system_of, look

WSL2 = "Linux version 5.15.153.1-microsoft-standard-WSL2 (root@941d701f84f1) (gcc (GCC) 11.2.0) #1 SMP"
WSL1 = "Linux version 4.4.0-22621-Microsoft (Microsoft@Microsoft.com) (gcc version 5.4.0 (GCC)) #1-Microsoft"
DEBIAN = "Linux version 6.1.0-18-amd64 (debian-kernel@lists.debian.org) (gcc-12 (Debian 12.2.0-14) 12.2.0)"
MOUNTS = """\
/dev/sdc / ext4 rw,relatime,discard,errors=remount-ro,data=ordered 0 0
C:\\134 /mnt/c 9p rw,noatime,dirsync,aname=drvfs;path=C:\\;uid=1000,cache=5,trans=fd 0 0
none /run tmpfs rw,nosuid,nodev,mode=755 0 0
"""
GOOD = Windows(WSL2, 24 << 30, "mirrored", "/home/ada/.local/share/hetnode", "ext4", 0.4)


def by_subject(found: list[CheckResult]) -> dict[str, CheckResult]:
    return {each.subject: each for each in found}


def test_another_linux_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "version").write_text(DEBIAN)
    assert look(tmp_path / "version") is None
    assert look(tmp_path / "none") is None
    assert check_wsl(None) == []


def test_what_wsl_shows_is_read(tmp_path: Path) -> None:
    version, mounts, clock = (tmp_path / name for name in ("version", "mounts", "clock"))
    version.write_text(WSL2)
    mounts.write_text(MOUNTS)
    clock.write_text(f"{int(time.time()) + 3600}\n")
    found = look(version, mounts, clock)
    assert found is not None
    assert found.memory > 1 << 28
    assert found.file_system == "ext4"
    assert found.behind is not None
    assert 3590 < found.behind <= 3600
    clock.unlink()
    assert look(version, mounts, clock) == replace(found, behind=None)


def test_a_machine_that_is_set_up_well_has_no_warning() -> None:
    found = by_subject(check_wsl(GOOD))
    assert {each.severity for each in found.values()} == {Severity.OK}
    assert "24.0 GiB" in found["WSL memory"].found
    assert "a service does not keep WSL awake" in found["WSL rest"].remedy


@pytest.mark.parametrize(
    ("changes", "subject", "words"),
    [
        ({"network": "nat"}, "WSL network", ("nobody can dial", "networkingMode=mirrored", "relay")),
        ({"network": ""}, "WSL network", ("NAT by default", "networkingMode=mirrored")),
        ({"file_system": "9p"}, "WSL disk", ("disk of Windows", "--folder")),
        ({"behind": 5400.0}, "WSL clock", ("5400 s behind", "hwclock -s")),
        ({"kernel": WSL1}, "WSL", ("WSL 1", "--set-version")),
    ],
    ids=str,
)
def test_each_problem_has_a_warning_and_a_remedy(
    changes: dict[str, object], subject: str, words: tuple[str, ...]
) -> None:
    found = by_subject(check_wsl(replace(GOOD, **changes)))  # type: ignore[arg-type]
    told = found[subject]
    assert told.severity is Severity.WARNING
    assert [word for word in words if word not in f"{told.found} {told.remedy}"] == []
    assert sum(each.severity is Severity.WARNING for each in found.values()) == 1


def test_the_file_system_is_that_of_the_nearest_mount() -> None:
    assert file_system_of(Path("/mnt/c/Users/ada/hetnode"), MOUNTS) == "9p"
    assert file_system_of(Path("/home/ada"), MOUNTS) == "ext4"
    assert file_system_of(Path("/home/ada"), "") == ""
