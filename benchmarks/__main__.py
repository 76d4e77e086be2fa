"""All benchmarks of the wire in quick form: ``make bench``, below 15 minutes.

    python -m benchmarks                              # prints one Markdown table per part
    python -m benchmarks --only codec rounds

If a part cannot be measured on this machine, or fails, the output has the reason, and the others continue.
The exit status is 1 if a part failed that could have been measured here.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.tables import NotHere, Table, machine

PARTS = (
    "accounting",
    "codec",
    "projection",
    "inner_loop",
    "link",
    "pipeline",
    "rounds",
    "gathering",
    "reduction",
    "overlap",
    "history",
    "rules",
    "simulation",
    "coordinator",
)
"""Modules of this package with a function ``table(quick) -> Table``, which may raise NotHere."""


@dataclass(frozen=True)
class Measured:
    """One part: its table, or the `problem`. `failed`: it could have been measured here."""

    part: str
    seconds: float
    table: Table | None
    problem: str = ""
    failed: bool = False

    @property
    def markdown(self) -> str:
        if self.table is not None:
            return self.table.markdown
        how = "failed" if self.failed else "was left out"
        return f"### {self.part}\n\n*This part {how}: {self.problem}*\n"


def measure(part: str) -> Measured:
    """Measure `part` in quick form. Never raises: the result has the problem."""
    began = time.monotonic()
    try:
        table = importlib.import_module(f"benchmarks.{part}").table(True)
    except NotHere as error:
        return Measured(part, time.monotonic() - began, None, str(error))
    except Exception as error:  # the other parts continue
        traceback.print_exc()
        why = " ".join((str(error) or type(error).__name__).split())[:300]
        return Measured(part, time.monotonic() - began, None, why, failed=True)
    return Measured(part, time.monotonic() - began, table)


def section(measured: Sequence[Measured]) -> str:
    """The tables of all parts in Markdown."""
    head = f"Measured by `make bench`, all in quick form: {machine()}."
    return "\n".join([head, "", *(each.markdown for each in measured)])


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=str(PARTS))
    arguments = parser.parse_args()
    measured = []
    for part in arguments.only:
        print(f"{part} ...", file=sys.stderr, flush=True)
        measured.append(measure(part))
        print(f"{part}: {measured[-1].seconds:.0f} s", file=sys.stderr, flush=True)
    print(section(measured))
    return int(any(each.failed for each in measured))


if __name__ == "__main__":
    sys.exit(main())
