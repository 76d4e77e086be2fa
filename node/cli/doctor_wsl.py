"""Linux inside Windows (WSL 2): what is different there, and what to do about it."""

from __future__ import annotations

import shutil
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from platformdirs import user_data_path

from node.cli.doctor_checks import CheckResult, ok, warning

_VERSION, _MOUNTS = Path("/proc/version"), Path("/proc/mounts")
_CLOCK = Path("/sys/class/rtc/rtc0/since_epoch")
_SECONDS = 3.0
_OF_WINDOWS = ("9p", "drvfs", "virtiofs")
"""File systems by which WSL shows the disks of Windows."""
_SETTINGS = "in [wsl2] of %UserProfile%\\.wslconfig, then 'wsl --shutdown'"


@dataclass(frozen=True)
class Windows:
    """What WSL says of itself.

    Attributes:
        kernel: the text of /proc/version.
        memory: bytes of the virtual machine.
        network: "nat", "mirrored" or another mode; "" of a WSL that does not tell.
        folder, file_system: where nodes keep their folders, and what kind of file system that is.
        behind: seconds by which the clock is behind that of Windows; None if that is not known.
    """

    kernel: str
    memory: int
    network: str
    folder: str
    file_system: str
    behind: float | None


def look(version: Path = _VERSION, mounts: Path = _MOUNTS, clock: Path = _CLOCK) -> Windows | None:
    """None where this is no WSL. The files are those of Linux."""
    kernel = _text(version)
    if "microsoft" not in kernel.lower():
        return None
    folder, told = user_data_path("hetnode"), _text(clock).strip()
    behind = int(told) - time.time() if told.isdigit() else None
    network = _said("wslinfo", "--networking-mode")
    kind = file_system_of(folder, _text(mounts))
    return Windows(kernel, psutil.virtual_memory().total, network, str(folder), kind, behind)


def check_wsl(found: Windows | None) -> list[CheckResult]:
    """What is different; nothing where this is no WSL."""
    if found is None:
        return []
    if "wsl2" not in found.kernel.lower():
        return [
            warning("WSL", "this is WSL 1, which has no GPU", "Type 'wsl --set-version NAME 2' in Windows.")
        ]
    memory = f"{found.memory / 2**30:.1f} GiB; by default half of the memory of Windows"
    findings = [ok("WSL memory", memory, f"More: memory=24GB {_SETTINGS}.")]
    if found.network == "mirrored":
        findings.append(ok("WSL network", "mirrored: what reaches Windows reaches this node"))
    else:
        mode = found.network or "not told, NAT by default"
        remedy = f"Set networkingMode=mirrored {_SETTINGS}, and admit it in the firewall; or use a relay."
        findings.append(warning("WSL network", f"{mode}: nobody can dial this node", remedy))
    if found.file_system in _OF_WINDOWS:
        cause = f"{found.folder} is on a disk of Windows: slow, and without the locks of Linux"
        findings.append(
            warning("WSL disk", cause, "Keep it below /home of Linux, or give join such a --folder.")
        )
    if found.behind is not None and found.behind > _SECONDS:
        cause = f"{found.behind:.0f} s behind that of Windows, as after a sleep of Windows"
        findings.append(
            warning("WSL clock", cause, "Type 'sudo hwclock -s'; or 'wsl --shutdown' in Windows.")
        )
    rest = (
        "Let Windows not sleep while plugged in, and keep a terminal open: a service does not keep WSL awake."
    )
    return [
        *findings,
        ok("WSL rest", "it stops when Windows sleeps, or some time after its last terminal", rest),
    ]


def file_system_of(folder: Path, mounts: str) -> str:
    """The kind of file system of `folder` by the text of /proc/mounts; "" if that does not say."""
    kinds = {Path(each[1]): each[2] for line in mounts.splitlines() if len(each := line.split()) > 2}
    return next((kinds[place] for place in (folder, *folder.parents) if place in kinds), "")


def _text(file: Path) -> str:
    with suppress(OSError):
        return file.read_text(errors="replace")
    return ""


def _said(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return ""
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=5.0)
        return done.stdout.strip().lower() if not done.returncode else ""
    return ""
