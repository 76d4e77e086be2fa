"""The program in docs/research.md."""

from __future__ import annotations

import re
from textwrap import dedent

from tests.support.paths import ROOT


def notebook() -> tuple[str, str]:
    """The part that trains in runs/mine, and the part that reads what is there then."""
    page = (ROOT / "docs" / "research.md").read_text()
    found = re.search(r"^    import hetnode\n(?:    .*\n|\n)+", page, re.MULTILINE)
    assert found is not None
    begin, read, rest = dedent(found[0]).partition("history = ")
    return begin, "import hetnode\n" + read + rest
