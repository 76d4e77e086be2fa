"""How many examples an expensive property looks at."""

from __future__ import annotations

import os


def examples(gate: int, search: int) -> int:
    """`gate` in `make test`, which looks at the same ones each time; `search` in `make search`."""
    return search if "HETNODE_SEARCH" in os.environ else gate
