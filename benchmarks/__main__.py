"""All benchmarks of the wire in quick form: ``make bench``, below 15 minutes.

    python -m benchmarks                              # prints one Markdown table per part
    python -m benchmarks --only codec rounds
    python -m benchmarks --write FILE                 # replaces what is between its markers

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
from pathlib import Path

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

BEGIN, END = "<!-- begin of what `make bench` writes -->", "<!-- end of what `make bench` writes -->"


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
    """The generated section, without its markers."""
    head = f"Measured by `make bench`, all in quick form: {machine()}."
    return "\n".join([head, "", *(each.markdown for each in measured)])


def replaced(document: str, text: str) -> str:
    """`document` with `text` between the markers. Raises ValueError unless it has exactly one of each."""
    if document.count(BEGIN) != 1 or document.count(END) != 1:
        raise ValueError(f"the document needs one line '{BEGIN}' and one line '{END}'")
    before, _, rest = document.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"'{END}' comes before '{BEGIN}'")
    return f"{before}{BEGIN}\n\n{text.strip()}\n\n{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=str(PARTS))
    parser.add_argument("--write", type=Path, default=None, metavar="FILE", help="replace the section there")
    arguments = parser.parse_args()
    if arguments.write is not None and arguments.only is not PARTS:
        parser.error("--write replaces the tables of all parts: not with --only")
    if arguments.write is not None:
        replaced(arguments.write.read_text(encoding="utf-8"), "")  # fail now and not after ten minutes
    measured = []
    for part in arguments.only:
        print(f"{part} ...", file=sys.stderr, flush=True)
        measured.append(measure(part))
        print(f"{part}: {measured[-1].seconds:.0f} s", file=sys.stderr, flush=True)
    text = section(measured)
    print(text)
    if arguments.write is not None:
        document = arguments.write.read_text(encoding="utf-8")
        arguments.write.write_text(replaced(document, text), encoding="utf-8")
    return int(any(each.failed for each in measured))


if __name__ == "__main__":
    sys.exit(main())
