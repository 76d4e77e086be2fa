"""What the operator tells the readers of the pages, in files that may hold anything."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from coordinator.membership.open_places import OpenTerms
from coordinator.ops.dashboard.about import ABOUT_FILE, SAMPLES_FILE, About, read_about
from protocol.wire.run_page import PATH, open_page
from tests.builders import spec_of
from tests.support.coordinator_process import running
from tests.support.dashboard import ask

LOOPBACK, EVERYWHERE = "127.0.0.1:0", "0.0.0.0:0"
HOSTILE = "<script>alert(1)</script>"
ESCAPED = "&lt;script&gt;alert(1)&lt;/script&gt;"


def written(folder: Path, about: str, samples: str = "") -> About:
    (folder / ABOUT_FILE).write_text(about)
    (folder / SAMPLES_FILE).write_text(samples)
    return read_about(folder)


def test_the_first_heading_is_the_title_and_the_rest_is_text(tmp_path: Path) -> None:
    assert read_about(tmp_path) == About()
    told = written(tmp_path, "\ufeff## Our model ##\n\nOne\ntwo:\n- a\n- b\n\n# Who\n", "def a\n\ndef b\n")
    assert told == About("Our model", "One two:\n- a\n- b\n\n# Who", "def a\n\ndef b")
    assert written(tmp_path, "Only words.") == About("", "Only words.")


def test_a_large_file_is_read_at_one_end_and_its_letters_are_visible(tmp_path: Path) -> None:
    lines = [f"sample {i:06} é\x1b[31m\u202e" for i in range(20_000)]
    told = written(tmp_path, "# " + "t" * 300 + "\n" + "x" * 10_000_000, "\n".join(lines))
    assert len(told.title) == 100
    assert len(told.description) < 8192
    assert len(told.samples) <= 8192
    assert told.samples.startswith("sample ")
    assert told.samples.endswith("sample 019999 é [31m ")


@pytest.mark.parametrize("name", [ABOUT_FILE, SAMPLES_FILE])
@pytest.mark.parametrize("kind", ["folder", "pipe", "circle", "bytes"])
def test_no_file_stops_a_reader(tmp_path: Path, name: str, kind: str) -> None:
    path = tmp_path / name
    match kind:
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "circle":
            path.symlink_to(path)
        case _:
            path.write_bytes(b"\xff\xfe\x00" * 3)
    told = read_about(tmp_path)
    assert (told == About()) is (kind != "bytes")


@pytest.mark.parametrize("listen", [LOOPBACK, EVERYWHERE])
async def test_the_words_of_the_operator_are_text_on_the_page(tmp_path: Path, listen: str) -> None:
    """Where readers need a token, everybody sees them above the form for it."""
    front = "/" if listen == LOOPBACK else "/login"
    async with running(spec_of(), tmp_path, dashboard=listen, terms=OpenTerms(4, 4)) as coordinator:
        assert "What the model says" not in (await ask(tmp_path, front)).text
        written(tmp_path, f"# Ours {HOSTILE}\nWords {HOSTILE}", f"def {HOSTILE}")
        page = (await ask(tmp_path, front)).text
        for part in (f"<h2>Ours {ESCAPED}</h2>", f"<p>Words {ESCAPED}</p>", f"def {ESCAPED}</pre>"):
            assert part in page
        assert HOSTILE not in page
        assert open_page((await ask(tmp_path, PATH)).body)[0].title == f"Ours {HOSTILE}"
        assert coordinator.address not in page


async def test_a_run_that_is_not_published_tells_strangers_nothing(tmp_path: Path) -> None:
    async with running(spec_of(), tmp_path, dashboard=EVERYWHERE):
        written(tmp_path, "# Ours\nWords", "def")
        page = (await ask(tmp_path, "/login")).text
        for part in ("Ours", "Words", "What the model says"):
            assert part not in page
