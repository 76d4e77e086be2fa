"""Microbatches are read ahead of the trainer: in order, not too far, and what a plan changes is dropped."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Callable

import numpy as np
import pytest

from node.data.ahead import MOST_AHEAD
from node.data.microbatches import MicrobatchReader
from node.data.stream import SampleStream
from node.data.streamed import Ordinals, Samples
from protocol.errors import ErrorCode, HetnodeError
from protocol.run_files.resolve import resolve
from tests.support.paths import ROOT

SPEC = resolve("nano", overrides={"inner.steps": 10, "inner.microbatches": 4, "inner.microbatch_size": 3})
ROUND = SPEC.samples_per_round(4)
MICROBATCHES = [(step, each) for step in range(10) for each in range(4)]


class Recorded:
    """Samples that are their ordinals. Notes what is read, and by which thread."""

    def __init__(self, check: Callable[[Ordinals], None] = lambda _: None) -> None:
        self._check = check
        self.reads: list[int] = []
        self.threads: set[threading.Thread] = set()
        self._one_more = threading.Semaphore(0)

    def read(self, ordinals: Ordinals) -> Samples:
        self.threads.add(threading.current_thread())
        self._check(ordinals)
        self.reads.append(ordinals[0])
        self._one_more.release()
        return np.array([[ordinal] for ordinal in ordinals], dtype=np.int32)

    def wait_for(self, count: int) -> None:
        """Until `count` more reads have ended."""
        for _ in range(count):
            assert self._one_more.acquire(timeout=60)


def _reader(recorded: Recorded, rank: int = 0, ranks: int = 1) -> MicrobatchReader:
    reader = MicrobatchReader(SPEC, SampleStream(recorded, recorded), rank, ranks)
    reader.assign(range(ROUND, 2 * ROUND))
    return reader


def _firsts(start: int, count: int) -> list[int]:
    return [start + 3 * index for index in range(count)]


def test_samples_are_those_that_were_asked_for_and_each_is_read_once_in_order() -> None:
    recorded = Recorded()
    reader = _reader(recorded)
    for number in range(1, 4):
        reader.assign(range(number * ROUND, (number + 1) * ROUND))
        for step, each in MICROBATCHES:
            samples = reader.training(step, each)
            assert samples[:, 0].tolist() == list(reader.ordinals(step, each))
    expected = _firsts(ROUND, 3 * len(MICROBATCHES))
    assert recorded.reads[: len(expected)] == expected, "in later rounds, too, nothing is read twice"


def test_what_comes_next_is_read_while_the_trainer_computes_but_not_more() -> None:
    recorded = Recorded()
    reader = _reader(recorded)
    reader.training(0, 0)
    recorded.wait_for(1 + MOST_AHEAD)
    assert recorded.reads == _firsts(ROUND, 1 + MOST_AHEAD)
    reader.training(0, 1)
    recorded.wait_for(1)
    assert recorded.reads == _firsts(ROUND, 2 + MOST_AHEAD)
    assert threading.current_thread() not in recorded.threads


def test_a_rank_reads_ahead_its_own_microbatches() -> None:
    recorded = Recorded()
    reader = _reader(recorded, rank=1, ranks=2)
    own = [(step, each) for step, each in MICROBATCHES if each % 2 == 1]
    for step, each in own:
        reader.training(step, each)
    assert recorded.reads == [reader.ordinals(step, each)[0] for step, each in own]


def test_samples_of_another_plan_take_the_place_of_those_read_ahead() -> None:
    recorded = Recorded()
    reader = _reader(recorded)
    reader.training(0, 0)
    reader.assign(range(50 * ROUND, 51 * ROUND))
    assert reader.training(0, 1)[:, 0].tolist() == list(range(50 * ROUND + 3, 50 * ROUND + 6))
    read = recorded.reads
    assert read.index(50 * ROUND + 3) <= 2 + MOST_AHEAD
    assert reader.training(9, 3)[0, 0] == 51 * ROUND - 3
    assert reader.training(10, 0)[0, 0] == 50 * ROUND, "a step beyond H reads the round again"


def test_a_failure_is_raised_when_its_samples_are_asked_for_and_not_kept() -> None:
    broken = {ROUND + 3}

    def check(ordinals: Ordinals) -> None:
        if ordinals[0] in broken:
            raise HetnodeError(ErrorCode.DATA_UNREADABLE, "Broken.", "Repair it.")

    reader = _reader(Recorded(check))
    assert reader.training(0, 0)[0, 0] == ROUND
    with pytest.raises(HetnodeError, match="Broken"):
        reader.training(0, 1)
    broken.clear()
    assert reader.training(0, 1)[0, 0] == ROUND + 3


def test_the_thread_ends_with_its_reader() -> None:
    recorded = Recorded()
    reader = _reader(recorded)
    reader.training(0, 0)
    (thread,) = recorded.threads
    del reader
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


def test_a_process_ends_while_its_samples_are_read() -> None:
    """A hub that does not answer keeps nobody waiting."""
    code = """
import threading
from node.data.ahead import ReadAhead
began = threading.Event()
def read(ordinals):
    if ordinals.start:
        began.set()
        threading.Event().wait()
reader = ReadAhead(read)
reader.read(range(0, 1), [range(1, 2)])
began.wait()
print("reads")
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=120, check=True
    )
    assert ended.stdout == b"reads\n"
