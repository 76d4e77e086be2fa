"""A static page in a real browser, from a file: no server, and no place of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.ops.dashboard.about import ABOUT_FILE, DOWNLOADS_FILE, SAMPLES_FILE
from coordinator.ops.dashboard.site import write_site
from protocol.wire.run_page import RunPage
from tests.support.browser import Browser
from tests.support.coordinator_run import play_round, started
from tests.support.kept_run import folder_of

pytestmark = pytest.mark.browser


def test_a_site_is_read_from_a_file(tmp_path: Path, browser: Browser) -> None:
    run = started(replicas=2, stages=2, rounds=5)
    for _ in range(2):
        run.now += 20
        play_round(run)
    folder = tmp_path / "folder"
    folder.mkdir()
    folder_of(run, folder)
    (folder / ABOUT_FILE).write_text("# Our model\nWhat it is for.")
    (folder / SAMPLES_FILE).write_text("def a():\n    return 1")
    (folder / DOWNLOADS_FILE).write_text("https://example.org/checkpoint After round 2")
    write_site(folder, tmp_path / "site", RunPage("a-b", "0" * 64, 1, 5, 2, 2, contact="Ask Ada."))
    browser.open((tmp_path / "site" / "index.html").as_uri())
    browser.wait_for("h1", "Our model", 10)
    for text in ("What it is for.", "return 1", "After round 2", "Ask Ada.", "2 of 5 rounds are done"):
        assert text in browser.text
    for scheme, width in (("light", 1280), ("dark", 360)):
        browser.prefer(scheme)
        browser.resize(width, 800)
        assert not browser.is_too_wide, width
    styled = "return getComputedStyle(document.querySelector('.card')).borderRadius !== '0px'"
    assert browser.run(styled), "the style sheet beside it is used"
    drawn = "return document.querySelector('polyline').getBoundingClientRect().width"
    assert browser.run(drawn) > 200
    assert browser.complaints() == []
