"""The version of this program, for people: logs, metrics, reports and results name it."""

from __future__ import annotations

import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

COMMIT = ""
"""Of the sources of a wheel: .ci/build_backend.py writes it here."""
ROOT = Path(__file__).parents[2]
_GIT_SECONDS = 5.0


@cache
def program_version() -> str:
    """Of the installed package; "checkout" where the folder is used without an installation."""
    try:
        return version("hetnode")
    except PackageNotFoundError:
        return "checkout"


def source_commit() -> str:
    """The commit of the sources, "-dirty" where a checkout was changed; "" where nothing tells."""
    if COMMIT or not (ROOT / ".git").exists():
        return COMMIT
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_GIT_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()
