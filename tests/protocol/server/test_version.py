"""The version that logs, metrics and results name."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import pytest

import protocol.server.version
from protocol.server.version import program_version


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
