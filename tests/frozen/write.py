"""Writes the golden values anew: ``python -m tests.frozen.write``. A change of the file needs a reason."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from typing import Any

from tests.frozen.trained import trained
from tests.frozen.values import SECTIONS
from tests.support.paths import ROOT

GOLDEN = ROOT / "tests" / "frozen" / "golden.json"

if __name__ == "__main__":
    values: dict[str, Any] = {name: compute() for name, compute in {**SECTIONS, "trained": trained}.items()}
    values["of"] = f"{sys.version_info.major}.{sys.version_info.minor}, {version('torch')}"
    GOLDEN.write_text(json.dumps(values, indent=1, allow_nan=False) + "\n", encoding="utf-8")
