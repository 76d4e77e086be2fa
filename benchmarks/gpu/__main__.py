"""All that a GPU shows of this program: ``make gpu``, below 10 minutes on one H100, without a network.

    python -m benchmarks.gpu --out runs/gpu                # writes gpu.json and gpu.md there
    python -m benchmarks.gpu --only speed packing
    python -m benchmarks.gpu --device cpu --toy            # seconds a part: proves that all of it runs

Needs torch, numpy, grpcio, protobuf, uvloop and what the tests import. A part that needs a package which is
not here, such as the transport's, is left out with a line. The exit status is 1 if a part failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.gpu.setting import PARTS, Setting
from benchmarks.tables import NotHere, machine

_LIMIT_SECONDS = 240.0
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Result:
    """One part: `outcome` is "measured", "left out" or "failed"; `text` is its page or the reason."""

    part: str
    outcome: str
    seconds: float
    text: str
    figures: Any


def run_part(name: str, device: str, toy: bool, out: Path) -> Result:
    """Measure a part in a process of its own, whose figures it reads from a file."""
    answer = out / f"{name}.part.json"
    answer.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.gpu", "--part", name, "--device", device, "--out", str(out)]
    start = time.monotonic()
    try:
        process = subprocess.run(
            [*command, *["--toy"] * toy],
            check=False, cwd=_ROOT, env=_environment(), timeout=_LIMIT_SECONDS,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        output = process.stdout
    except subprocess.TimeoutExpired as expired:
        output = f"{expired.stdout or ''!s}\nended after {_LIMIT_SECONDS:.0f} s"
    seconds = time.monotonic() - start
    if not answer.exists():
        return Result(name, "failed", seconds, f"```\n{output[-4000:]}\n```", None)
    found = json.loads(answer.read_text())
    answer.unlink()
    return Result(name, found["outcome"], seconds, found["text"], found["figures"])


def _environment() -> dict[str, str]:
    """This process's own, in which the checkout need not be installed."""
    path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path}


def answer_part(name: str, device: str, toy: bool, out: Path) -> None:
    """Measure a part here, and write its answer. A part that is not possible here says why."""
    try:
        where = {"tests": "whole", "swarm": "whole", "memory": "policies"}.get(name, "parts")
        module = import_module(f"benchmarks.gpu.{where}")  # the driver itself needs no torch
        table, figures = getattr(module, f"measure_{name}")(Setting(device, toy, out))
    except (NotHere, ImportError) as error:
        found = {"outcome": "left out", "text": f"{error}.", "figures": None}
    else:
        found = {"outcome": "measured", "text": table.markdown, "figures": figures}
    (out / f"{name}.part.json").write_text(json.dumps(found))


def page(results: Sequence[Result], device: str) -> str:
    """All parts in Markdown."""
    parts = [f"## On {device}\n\nMeasured {machine()}, by `make gpu`.\n"]
    for result in results:
        heading = "" if result.outcome == "measured" else f"### {result.part}\n\nThis part {result.outcome}: "
        parts.append(f"{heading}{result.text}")
    return "\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--toy", action="store_true", help="tiny sizes, which show only that all parts run")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"))
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    if chosen.part:
        answer_part(chosen.part, chosen.device, chosen.toy, chosen.out)
        return 0
    results = []
    for name in chosen.only:
        results.append(run_part(name, chosen.device, chosen.toy, chosen.out))
        print(f"{name}: {results[-1].outcome}, {results[-1].seconds:.0f} s", flush=True)
        (chosen.out / "gpu.json").write_text(json.dumps([asdict(result) for result in results], indent=1))
        (chosen.out / "gpu.md").write_text(page(results, chosen.device))
    print((chosen.out / "gpu.md").read_text())
    return int(any(result.outcome == "failed" for result in results))


if __name__ == "__main__":
    sys.exit(main())
