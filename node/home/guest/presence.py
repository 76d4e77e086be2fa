"""Looks what others do on this machine: sessions and their idle time, the CPU, the GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import psutil

from node.home.guest.idle import Presence

_TOOL_SECONDS = 5.0
_IDLE_SECONDS = 300.0
_LOOK_SECONDS = 0.5


def look() -> Presence:
    """The present state of this machine. Takes about a second."""
    return Presence(_at_keyboard(), _cpu_of_others(), _gpu_of_others())


def sessions_in_use(described: str) -> bool:
    """Whether someone uses one of the local sessions that ``loginctl show-session`` has described."""
    for session in described.split("\n\n"):
        facts = dict(line.partition("=")[::2] for line in session.splitlines())
        is_a_person = facts.get("Class", "user") == "user" and facts.get("Remote") == "no"
        if is_a_person and facts.get("Active") == "yes" and facts.get("IdleHint") == "no":
            return True
    return False


def idle_seconds_of_mac(described: str) -> float | None:
    """Seconds since the last key or move of the mouse, in what ``ioreg -c IOHIDSystem`` has described."""
    found = re.search(r'"HIDIdleTime" = (\d+)', described)
    return int(found[1]) / 1e9 if found else None


def gpu_share(monitored: str, own: set[int]) -> float:
    """The largest share of a GPU that processes other than `own` use, by ``nvidia-smi pmon -c 1 -s u``."""
    shares: dict[str, float] = {}
    for line in monitored.splitlines():
        gpu, pid, _, used, *_ = [*line.split(), "-", "-", "-", "-"]
        if gpu.isdigit() and pid.isdigit() and used.isdigit() and int(pid) not in own:
            shares[gpu] = shares.get(gpu, 0.0) + int(used) / 100
    return max(shares.values(), default=0.0)


def _at_keyboard() -> bool | None:
    if sys.platform == "darwin":
        described = said("ioreg", "-c", "IOHIDSystem", "-d", "4")
        idle = None if described is None else idle_seconds_of_mac(described)
        return None if idle is None else idle < _IDLE_SECONDS
    if (idle_ms := said("xprintidle")) is not None and idle_ms.strip().isdigit():
        return int(idle_ms) < 1000 * _IDLE_SECONDS
    listed = said("loginctl", "list-sessions", "--no-legend")
    if listed is None:
        return None
    names = [line.split()[0] for line in listed.splitlines() if line.strip()]
    if not names:
        return False
    facts = ("Class", "Remote", "Active", "IdleHint")
    described = said("loginctl", "show-session", *names, *(f"--property={fact}" for fact in facts))
    return None if described is None else sessions_in_use(described)


def _cpu_of_others() -> float | None:
    """The share of all cores that processes use which are not of this node."""
    own = _own_processes()
    before = _seconds_of(own)
    everything = psutil.cpu_percent(_LOOK_SECONDS) / 100
    used = sum(max(0.0, after - before.get(pid, after)) for pid, after in _seconds_of(own).items())
    return max(0.0, everything - used / _LOOK_SECONDS / (psutil.cpu_count() or 1))


def _gpu_of_others() -> float | None:
    monitored = said("nvidia-smi", "pmon", "-c", "1", "-s", "u")
    return None if monitored is None else gpu_share(monitored, {each.pid for each in _own_processes()})


def _own_processes() -> list[psutil.Process]:
    own = psutil.Process()
    return [own, *own.children(recursive=True)]


def _seconds_of(processes: list[psutil.Process]) -> dict[int, float]:
    """CPU seconds so far by process, of those that live."""
    seconds = {}
    for process in processes:
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        seconds[process.pid] = times.user + times.system
    return seconds


def said(*command: str) -> str | None:
    """The output of a tool; None where it is not installed, or fails."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TOOL_SECONDS, check=False, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
