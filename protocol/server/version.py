"""The version of this program, for people: logs, metrics, reports and results name it."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def program_version() -> str:
    """Of the installed package; "checkout" where the folder is used without an installation."""
    try:
        return version("hetnode")
    except PackageNotFoundError:
        return "checkout"
