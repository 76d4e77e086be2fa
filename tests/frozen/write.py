"""Writes the golden values anew: ``python -m tests.frozen.write``. A change of the file needs a reason."""

from __future__ import annotations

import json

from tests.frozen.trained import trained
from tests.frozen.values import SECTIONS
from tests.support.paths import ROOT

GOLDEN = ROOT / "tests" / "frozen" / "golden.json"

if __name__ == "__main__":
    values = {name: compute() for name, compute in {**SECTIONS, "trained": trained}.items()}
    GOLDEN.write_text(json.dumps(values, indent=1, allow_nan=False) + "\n", encoding="utf-8")
