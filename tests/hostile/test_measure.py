"""The watch of a swarm finds growth, an end and an aborted round."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from tests.hostile.measure import unharmed
from tests.support.waiting import wait_until

# Grows by 32 MiB for each line that it reads.
_GROWS = "import sys; kept = []\nfor line in sys.stdin: kept.append(b'x' * (32 << 20)); print(flush=True)"


class OneProcess:
    """A swarm of one process, which grows on request."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _GROWS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.started = {"coordinator": self}
        self.decided: list[dict[str, Any]] = []
        self.grow()  # it has imported what it needs

    def tree(self) -> list[psutil.Process]:
        return [psutil.Process(self.process.pid)]

    def decisions(self) -> list[dict[str, Any]]:
        return self.decided

    def grow(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self.process.stdout.readline()


@pytest.fixture
def swarm() -> Iterator[OneProcess]:
    one = OneProcess()
    yield one
    one.process.kill()
    one.process.wait()


def grow(swarm: OneProcess, times: int) -> None:
    with unharmed(swarm) as watch:
        for _ in range(times):
            swarm.grow()
        wait_until(lambda: watch.memory[0].growth >= (times - 1) * 32 << 20, 30, "a sample of the watch")


def end(swarm: OneProcess) -> None:
    with unharmed(swarm):
        swarm.process.kill()
        swarm.process.wait()


def abort_a_round(swarm: OneProcess) -> None:
    with unharmed(swarm) as watch:
        swarm.decided = [*swarm.decided, {"committed": True}, {"committed": False}]
        assert "1 of 2" in watch.report()


def test_a_little_growth_and_rounds_that_were_aborted_before_are_no_harm(swarm: OneProcess) -> None:
    swarm.decided = [{"committed": False}]
    grow(swarm, 1)


@pytest.mark.parametrize(
    ("harm", "found"),
    [
        (lambda swarm: grow(swarm, 4), "grown by more than"),
        (end, "has ended"),
        (abort_a_round, "aborted"),
    ],
)
def test_harm_is_found(swarm: OneProcess, harm: Callable[[OneProcess], None], found: str) -> None:
    with pytest.raises(AssertionError, match=found):
        harm(swarm)
