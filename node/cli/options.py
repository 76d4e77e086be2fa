"""Options that several commands share, and how their values are read."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from node.command_runner import bad_option

NETWORK = "Network"
"""The panel of the network options in the help."""

Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log details.")]
HiddenLifeline = Annotated[int | None, typer.Option("--lifeline", hidden=True)]
"""Descriptor of a pipe that the parent holds open: the command ends when it closes."""

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def seconds_of(text: str, option: str) -> float:
    """A duration such as ``90s``, ``15m``, ``24h`` or ``7d``. Raises HetnodeError BAD_OPTION."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,3})?)([smhd])", text.strip())
    if match is None or not float(match[1]):
        raise bad_option(f"{option} '{text}' is not a duration.", "Write it like 90s, 15m, 24h or 7d.")
    return float(match[1]) * _UNITS[match[2]]
