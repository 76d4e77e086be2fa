"""Every test here is marked `network`, and is skipped with a reason where no namespaces can be made."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.network.world import missing


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.network)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if reason := missing():
        pytest.skip(reason)
