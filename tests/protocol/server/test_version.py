"""The version that logs, metrics and results name."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

import protocol.server.version
from protocol.server.version import program_version, source_commit
from tests.support.paths import ROOT


def test_a_checkout_that_is_not_installed_has_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial of hours would end without a result."""
    assert program_version() == version("hetnode")

    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(protocol.server.version, "version", missing)
    program_version.cache_clear()
    try:
        assert program_version() == "checkout"
    finally:
        program_version.cache_clear()


def test_a_checkout_knows_the_commit_of_its_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    if (ROOT / ".git").exists():
        assert re.fullmatch(r"[0-9a-f]{7,}(-dirty)?", source_commit())
    monkeypatch.setattr(protocol.server.version, "COMMIT", "0123abc")
    assert source_commit() == "0123abc"


def test_a_folder_without_git_names_no_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(protocol.server.version, "ROOT", tmp_path)
    assert source_commit() == ""
    (tmp_path / ".git").touch()  # of something that git does not know
    assert source_commit() == ""
