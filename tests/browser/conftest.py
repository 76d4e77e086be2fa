"""A real browser for the tests of the dashboard: Debian's chromium, without a screen."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.browser import Browser

CHROMIUM, DRIVER = "chromium", "chromedriver"


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    if not (shutil.which(CHROMIUM) and shutil.which(DRIVER)):
        pytest.skip("needs chromium and chromedriver: apt-get install chromium chromium-driver")
    found = Browser(tmp_path / "browser")
    yield found
    found.close()
