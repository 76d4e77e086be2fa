"""Names the program that has written a file: its records mean the same to this program alone."""

from __future__ import annotations

from functools import cache
from hashlib import sha256
from pathlib import Path


@cache
def program_hash() -> str:
    """A hash over the sources of coordinator and protocol, whose rules make states and rows from events."""
    found, root = sha256(), Path(__file__).parents[2]
    for package in ("coordinator", "protocol"):
        for path in sorted((root / package).rglob("*.py")):
            found.update(f"{path.relative_to(root)}\n".encode() + sha256(path.read_bytes()).digest())
    return found.hexdigest()
