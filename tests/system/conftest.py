"""Fixtures for the tests of whole swarms.

What a fixture needs is imported when the fixture is used: a run of a few small tests imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.overlap import Records


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> Records:
    """What the trainer of each node does in this test."""
    from tests.support.overlap import record_trainers  # noqa: PLC0415

    return record_trainers(monkeypatch)
