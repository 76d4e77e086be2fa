"""The documents: what is made from the code is fresh, links lead somewhere, and sizes stay."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.reference import FOLDER, PAGES
from tests.support.paths import ROOT

DOCUMENTS = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("name", PAGES)
def test_the_reference_is_fresh(name: str) -> None:
    """If this fails: python -m benchmarks.reference."""
    assert (FOLDER / f"{name}.md").read_text() == PAGES[name]()


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target
