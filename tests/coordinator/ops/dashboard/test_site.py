"""The public page as files: for any web host, from a folder whose coordinator runs or not."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from coordinator.membership.open_places import OpenTerms
from coordinator.ops.dashboard.about import ABOUT_FILE, DOWNLOADS_FILE, SAMPLES_FILE, read_about
from coordinator.ops.dashboard.site import SITE_VERSION, write_site
from coordinator.run.state.commands import BindOwner
from protocol.trust.owner import OwnerKey
from protocol.wire.run_page import PATH, RunPage, open_page
from tests.builders import keyed, spec_of
from tests.support import commands
from tests.support.coordinator_process import running
from tests.support.coordinator_run import Run, play_round, started
from tests.support.kept_run import A, folder_of

HOSTILE = "<script>alert(1)</script>"
KEY = OwnerKey(b"a" * 16)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """That of a run of two replicas, of one owner, that has finished."""
    run: Run = started(replicas=2, stages=2, rounds=2)
    for peer in (A, keyed(1)):
        run.accept(BindOwner(KEY.bind(run.state.run, peer.peer, peer.sign)))
    for _ in range(2):
        run.now += 20
        play_round(run)
    (tmp_path / "folder").mkdir()
    return folder_of(run, tmp_path / "folder")


class _Links(HTMLParser):
    """What a page refers to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.tags: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.found += [value or "" for name, value in attrs if name in ("href", "src", "action")]


def test_a_site_has_all_in_relative_files_and_no_script(folder: Path, tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    out = tmp_path / "deep" / "site"
    write_site(folder, out, None)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    page = (out / "index.html").read_text()
    links = _Links(page)
    assert links.found
    assert all((out / link).is_file() for link in links.found), links.found
    assert "script" not in links.tags
    assert f"..{KEY.owner[-8:]}" in page
    assert "2 of 2 rounds" in page
    assert "Take part" not in page, "it is finished"
    assert "<polyline" in page


def test_its_json_says_the_same_to_programs(folder: Path, tmp_path: Path) -> None:
    write_site(folder, tmp_path / "site", None)
    found = json.loads((tmp_path / "site" / "run.json").read_text())
    assert found["hetnode_site"] == SITE_VERSION
    assert (found["phase"], found["rounds_decided"], found["rounds"]) == ("finished", 2, 2)
    assert found["losses"] == [[1, 4.0], [2, 3.0]]
    assert found["validation_loss"] == 3.0
    (person,) = found["people"]
    assert (person["id"], person["is_owner"], person["nodes"]) == (KEY.owner, True, 2)
    assert person["stage_tokens"] == found["stage_tokens"] > 0
    assert found["contributors"] == 1


def test_words_of_others_are_text_and_links_lead_to_the_web_alone(folder: Path, tmp_path: Path) -> None:
    (folder / ABOUT_FILE).write_text(f"# Ours {HOSTILE}\nWords {HOSTILE}")
    (folder / SAMPLES_FILE).write_text(f"def {HOSTILE}")
    (folder / DOWNLOADS_FILE).write_text(
        f"https://example.org/round-2 Round 2 {HOSTILE}\njavascript:alert(1) no\n  http://a/b\n"
        'https://a/"onclick=alert(1) x\n\nfile:///etc/passwd\n' + "https://c/d e\n" * 100
    )
    write_site(folder, tmp_path / "site", RunPage("a-b", "0" * 64, 1, 2, 2, 0, contact=HOSTILE))
    page = (tmp_path / "site" / "index.html").read_text()
    assert HOSTILE not in page
    assert "script" not in _Links(page).tags
    assert "<h1>Ours &lt;script" in page
    outside = [link for link in _Links(page).found if ":" in link]
    assert outside[:2] == ["https://example.org/round-2", "http://a/b"]
    assert len(outside) == len(read_about(folder).downloads) == 20
    assert set(outside) == {"https://example.org/round-2", "http://a/b", "https://c/d"}


def test_a_second_export_replaces_each_file_and_keeps_others(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "site"
    write_site(folder, out, None)
    (out / "CNAME").write_text("example.org")
    inode = (out / "index.html").stat().st_ino
    (folder / ABOUT_FILE).write_text("# Another title")
    write_site(folder, out, None)
    assert "Another title" in (out / "index.html").read_text()
    assert (out / "index.html").stat().st_ino != inode, "renamed over the old one"
    assert (out / "CNAME").read_text() == "example.org"
    assert not list(out.rglob("*.new"))


async def test_a_running_coordinator_tells_how_to_join(tmp_path: Path) -> None:
    folder, out = tmp_path / "folder", tmp_path / "site"
    folder.mkdir()
    terms = OpenTerms(4, 4)
    async with running(spec_of(), folder, dashboard="127.0.0.1:0", terms=terms):
        done = await _site(folder, out)
        assert done.returncode == 0, done.stderr
        assert str(out / "index.html") in done.stdout
        page = (out / "index.html").read_text()
        assert re.search(r"<code>hetnode join hetnode1-\S+</code>", page)
        published, invite = open_page((out / PATH.lstrip("/")).read_bytes())
        assert invite is not None
        assert published.run == json.loads((out / "run.json").read_text())["run"]
        for wrong in (folder / "site", tmp_path):
            refused = await _site(folder, wrong)
            assert "which has secrets" in refused.stderr
        (out / "run.json").unlink()
        refused = await _site(folder, out)
    assert refused.returncode != 0
    assert "was not written by this command" in refused.stderr


async def _site(folder: Path, out: Path) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(commands.hetnode, "site", str(folder), str(out))
