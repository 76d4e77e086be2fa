"""The syntax of source files, for tests of the tree."""

from __future__ import annotations

import ast
import gc
from functools import cache
from pathlib import Path


@cache
def syntax(path: Path) -> ast.Module:
    # CPython 3.11 keeps the depth of the tree that it builds in one place for all calls. A finalizer that
    # prints a traceback parses source, too: run in the middle of this call, it would overwrite that depth.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(path.read_text())
    finally:
        if was_enabled:
            gc.enable()
