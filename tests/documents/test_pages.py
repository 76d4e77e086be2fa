"""The documents: what is made from the code is fresh, links lead somewhere, and sizes stay."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.reference import FOLDER, PAGES
from node.cli.main import COMMANDS
from tests.support.paths import ROOT

DOCUMENTS = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]

USER_PAGES = [ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in ("join", "operate", "research"))]
MOST_README_LINES, MOST_PAGE_BYTES, MOST_BYTES = 120, 15_000, 234 * 1024
"""What is written beside the code is read only if it is short; who adds a page shortens another one. The last
5 kB are the standby, because who reads too little of it lets two coordinators decide, what programs and other
implementations may rely on: the Python package, owners, evaluations, and the JSON of a static page; and
object stores, which an operator pays for; and the files of prepared data, which others may write;
and what a model of 8B needs of homes, which decides whether anybody begins such a run; and documents apart,
which other implementations must read, and who has short ones wants to know of; and what a late
join takes, by which an operator chooses how often checkpoints are written; and 3 kB of radial updates, which
other implementations compute, and of where bytes are best spent; and 2 kB of what a reader of the protocol
had to guess: epochs of frames, waits, which links stay open, the hash of a changed run."""
MOST_TERMS, MOST_RECORD_LINES = 60, 15


@pytest.mark.parametrize("name", PAGES)
def test_the_reference_is_fresh(name: str) -> None:
    """If this fails: python -m benchmarks.reference."""
    assert (FOLDER / f"{name}.md").read_text() == PAGES[name]()


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_that_documents_name_exist(page: Path) -> None:
    tops = "benchmarks|coordinator|docker|docs|node|proto|protocol|tests"
    for path in re.findall(rf"`((?:{tops})/[\w/.-]+)`", page.read_text()):
        assert (ROOT / path).exists(), path


def test_the_documents_stay_small() -> None:
    """Limits, so that growth is a decision somebody writes down: what is longer is not read."""
    assert len((ROOT / "README.md").read_text().splitlines()) <= MOST_README_LINES
    for page in USER_PAGES:
        assert page.stat().st_size <= MOST_PAGE_BYTES, page.name
    assert sum(page.stat().st_size for page in DOCUMENTS) <= MOST_BYTES


def test_the_glossary_has_few_terms() -> None:
    rows = re.findall(r"^\| (?!term \|)[^|-]", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)
    assert len(rows) <= MOST_TERMS


def test_a_decision_is_a_short_record() -> None:
    for page in (ROOT / "docs" / "decisions").glob("*.md"):
        for record in re.split(r"\n\n+", page.read_text()):
            assert len(record.splitlines()) <= MOST_RECORD_LINES, record[:60]


@pytest.mark.parametrize("page", USER_PAGES, ids=lambda page: page.stem)
def test_pages_for_users_name_commands_that_exist(page: Path) -> None:
    text = page.read_text()
    code = [*re.findall(r"`([^`\n]+)`", text), *re.findall(r"^    (.*)$", text, re.MULTILINE)]
    known = set(re.findall(r"^\| `hetnode ([a-z ]+[a-z])", PAGES["commands"](), re.MULTILINE))
    named = [
        words for each in code for words in re.findall(r"(?<![/\w])hetnode ([a-z]+)(?: ([a-z]+))?", each)
    ]
    assert named
    for first, second in named:
        is_family = not second and any(each.startswith(f"{first} ") for each in known)
        assert is_family or first in known or f"{first} {second}" in known, (first, second)


@pytest.mark.parametrize("page", USER_PAGES, ids=lambda page: page.stem)
def test_examples_use_options_that_exist(page: Path) -> None:
    text = page.read_text().replace("\\\n", " ")
    lines = re.findall(r"^    (?:\S*/)?hetnode ([^#\n]+)", text, re.MULTILINE)
    assert lines
    for line in lines:
        words = shlex.split(line)
        assert set(re.findall(r"--[a-z][a-z-]*", line)) <= options_of(words), line


def options_of(words: Sequence[str]) -> set[str]:
    """The options of the command that `words` begin with, and of its family."""
    command, found = COMMANDS[words[0]].load(words[0]), set[str]()
    for word in words:
        found |= {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
        below = getattr(command, "commands", {})
        command = below.get(word, command)
    return found | {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
