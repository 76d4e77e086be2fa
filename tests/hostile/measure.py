"""What no attack may change: the memory of the processes of a swarm, and the rounds of its honest members.

    with unharmed(swarm) as watch:
        ...  # the attack
    print(watch.report())

At the end of the block every process of the swarm must live, must have grown by at most `most_growth` bytes
of resident memory, and no round may have been aborted. Enter it when the swarm has trained for two rounds:
before that, the processes still grow by themselves.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import psutil

from tests.support.waiting import is_alive

MOST_GROWTH = 64 << 20
"""Bytes by which an attack may make a process grow."""
SAMPLE_SECONDS = 0.25


class Tree(Protocol):
    """The latest process of a name; see tests.support.processes.Started."""

    def tree(self) -> list[psutil.Process]: ...


class Swarm(Protocol):
    """What is watched; tests.support.processes.ProcessSwarm is one."""

    started: dict[str, Tree]

    def decisions(self) -> list[dict[str, Any]]: ...


@dataclass
class Memory:
    """Resident memory of one process in bytes: at the first sample, and the largest of all samples."""

    name: str
    process: psutil.Process
    first: int
    most: int

    @property
    def growth(self) -> int:
        return self.most - self.first


class Watch:
    """Samples the memory of all processes of a swarm in a thread of its own."""

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm
        self._found: dict[int, Memory] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample_until_over, daemon=True)
        self._decided = len(swarm.decisions())

    def start(self) -> None:
        for name, started in self._swarm.started.items():
            for index, process in enumerate(started.tree()):
                with suppress(psutil.NoSuchProcess):
                    label = f"{name} {index} {process.name()}"
                    size = process.memory_info().rss
                    self._found[process.pid] = Memory(label, process, size, size)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    @property
    def memory(self) -> tuple[Memory, ...]:
        """Of every process that lived at the start."""
        return tuple(self._found.values())

    @property
    def decisions(self) -> list[dict[str, Any]]:
        """Of the rounds since the start: the lines of metrics.jsonl."""
        return self._swarm.decisions()[self._decided :]

    def report(self) -> str:
        """One line for each process, and one for the rounds."""
        lines = [f"{each.name:<32} {_mib(each.first)} MiB, +{_mib(each.growth)} MiB" for each in self.memory]
        decisions = self.decisions
        committed = sum(each["committed"] for each in decisions)
        return "\n".join([*lines, f"{committed} of {len(decisions)} decisions are commits"])

    def check(self, most_growth: int) -> None:
        """AssertionError if a process has ended or grown too much, or if a round was aborted."""
        ended = [each.name for each in self.memory if not is_alive(each.process)]
        assert not ended, f"processes that the attack has ended: {ended}"
        grown = [each.name for each in self.memory if each.growth > most_growth]
        assert not grown, f"grown by more than {_mib(most_growth)} MiB: {grown}\n{self.report()}"
        aborted = [each for each in self.decisions if not each["committed"]]
        assert not aborted, f"aborted rounds: {aborted}"

    def _sample_until_over(self) -> None:
        while not self._over.wait(SAMPLE_SECONDS):
            for memory in self._found.values():
                with suppress(psutil.NoSuchProcess):
                    memory.most = max(memory.most, memory.process.memory_info().rss)


@contextmanager
def unharmed(swarm: Swarm, most_growth: int = MOST_GROWTH) -> Iterator[Watch]:
    """Watch `swarm` during the block, and check it at the end unless the block has failed."""
    watch = Watch(swarm)
    watch.start()
    try:
        yield watch
    finally:
        watch.stop()
    watch.check(most_growth)


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f}"
