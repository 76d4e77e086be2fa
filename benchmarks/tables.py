"""The result of a benchmark: a table that can be printed and copied into the documentation."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date

from node.measure.hardware import processor

_NUMBER = re.compile(r"[-+]?[\d,.]+(e[-+]?\d+)?\s*(%|x)?")


class NotHere(Exception):
    """The measurement is not possible on this machine; the message says why."""


@dataclass(frozen=True)
class Table:
    """One table of the documentation.

    Attributes:
        title: in a few words.
        command: measures it again.
        columns: with units.
        rows: as many cells as there are columns; ValueError otherwise.
        notes: sentences: assumptions and limits of the figures.
    """

    title: str
    command: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"{self.title}: {len(row)} cells for {len(self.columns)} columns: {row}")

    @property
    def markdown(self) -> str:
        """GitHub Markdown: a heading, the command, the table, the notes as a list. Ends with a line break."""
        parts = [f"### {self.title}", f"    {self.command}"]
        if self.rows:
            rules = [_rule([row[column] for row in self.rows]) for column in range(len(self.columns))]
            parts.append("\n".join(map(_line, [self.columns, rules, *self.rows])))
        if self.notes:
            parts.append("\n".join(f"- {note}" for note in self.notes))
        return "\n\n".join(parts) + "\n"


def _rule(cells: Sequence[str]) -> str:
    """Columns of numbers are right-aligned, others left-aligned."""
    return "---:" if all(not cell or _NUMBER.fullmatch(cell) for cell in cells) else "---"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def machine() -> str:
    """Date and machine on one line, without host names and paths."""
    import torch  # noqa: PLC0415 - a benchmark that forks must be able to import this module without torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    system = f"{platform.system()} {platform.release().split('-')[0]}"
    accelerator = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return (
        f"{date.today().isoformat()}, {processor()}, {cores} cores{accelerator}, {system}, "
        f"Python {platform.python_version()}, torch {torch.__version__}"
    )
