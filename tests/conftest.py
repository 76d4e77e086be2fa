"""Settings for all tests, and the fixtures that several folders use.

What a fixture needs is imported when the fixture is used: a run of a few small tests imports no torch.
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from tests.support import watchdog
from tests.support.paths import ROOT

if TYPE_CHECKING:
    from node.data.stream import SampleStream
    from tests.support.faults import FaultPlan
    from tests.virtual.scenario import Play

# Tests run side by side, each with small tensors: threads of torch would only wait for one another. Libraries
# read this when they are imported, here and in the processes that tests start.
os.environ["OMP_NUM_THREADS"] = "1"
# Processes that tests start import the package tests, whatever their working folder.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))

# A disk that syncs slowly took half of the time of some tests. All that they write is small and soon removed.
MEMORY = Path("/dev/shm")
if "TMPDIR" not in os.environ and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 4 * 2**30:
    os.environ["TMPDIR"] = str(MEMORY)
    tempfile.tempdir = None  # pytest's capture has looked it up before, and tmp_path is below it

# Hypothesis' deadline per example is a wall-clock assertion, which a busy machine would fail. The gate has
# the same examples in each run, and `make search` others, and more of them.
settings.register_profile("hetnode", deadline=None, derandomize=True, max_examples=25)
settings.register_profile("search", deadline=None, print_blob=True, max_examples=100)
settings.load_profile("hetnode")


# What a killed test process has started would train on forever.
WATCHDOG = watchdog.start()

LONG = ("tests/system/", "tests/node/exchange/hive/", "tests/node/experiment/")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the tests of the virtual swarm."""
    if "play" in getattr(item, "fixturenames", ()):
        item.add_marker("virtual")


@pytest.hookimpl(trylast=True)  # once the tests of other tiers are gone
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with real swarms, on every second worker, and with the folders of long tests.

    Each worker begins with its share in this order, and later takes from the ends of others. Real swarms
    wait more than they compute: on every worker at once they would leave the cores idle, and at the end of
    the run all would wait for them.
    """
    swarms = [item for item in items if item.get_closest_marker("swarm")]
    files, known = list(dict.fromkeys(item.path for item in swarms)), {*swarms}
    rest = [item for item in items if item not in known]
    rest.sort(key=lambda item: not item.nodeid.startswith(LONG))
    groups = max(1, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) // 2)
    share, first = len(items) // groups, 0
    items.clear()
    for group in range(groups):
        own = [item for item in swarms if item.path in files[group::groups]]
        last = None if group == groups - 1 else first + max(0, share - len(own))
        items += [*own, *rest[first:last]]
        first = last or first


gc.disable()  # modules and tests stay: to look for garbage took a quarter of the time of their collection


def pytest_collection_finish() -> None:
    """Look for garbage of tests alone, and seldom: it took a tenth of their time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 10, 10)
    gc.enable()


@pytest.fixture(autouse=True)
def same_tensors() -> None:
    """Random tensors of a test are the same in every run, whatever ran before it in its process."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture
def plan(tmp_path: Path) -> FaultPlan:
    """The faults of this test, by member of its swarm."""
    from tests.support.faults import FaultPlan  # noqa: PLC0415

    return FaultPlan(tmp_path / "faults")


@pytest.fixture
def play(tmp_path: Path, plan: FaultPlan) -> Play:
    """Plays a scenario of the virtual swarm with the faults of `plan`."""
    from tests.virtual.scenario import Play  # noqa: PLC0415

    return Play(tmp_path, plan)


@pytest.fixture(scope="session")
def stream() -> SampleStream:
    """The samples of a replica whose steps a test makes one by one."""
    from node.data.stream import open_stream  # noqa: PLC0415
    from tests.support.hand_driven_replica import SPEC  # noqa: PLC0415

    return open_stream(SPEC)


@pytest.fixture
def one_thread() -> None:
    """torch computes with one thread from now on: equal bits, and no contest for the cores."""
    import torch  # noqa: PLC0415

    torch.set_num_threads(1)
