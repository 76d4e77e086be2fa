"""Scenarios on three machines."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest

from tests.support.certificates import authority
from tests.virtual import machines
from tests.virtual.machines import Machines


@pytest.fixture
def simulate(tmp_path: Path) -> Callable[[Callable[[Machines], Awaitable[None]]], None]:
    """Runs a scenario on the machines a, b and c."""
    authority()  # made once, on real time
    return partial(machines.simulate, folder=tmp_path)
