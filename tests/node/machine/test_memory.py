"""What a worker holds of main memory."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from node.ipc.worker_calls import (
    Apply,
    Backward,
    BeginRound,
    Build,
    Connect,
    EndInnerPhase,
    Forward,
    LocalData,
)
from node.worker import process
from protocol.types import StageRange
from tests.builders import spec_of

PROGRAM = """
import torch
from benchmarks.resident import resident
from node.machine.memory import keep_freed_tensors

for keeps in (False, True):
    keep_freed_tensors(keeps)
    before = resident("VmRSS")
    tensors = [torch.ones(2**18) for _ in range(128)]  # of 1 MiB each
    kept = tensors[1::2]
    del tensors
    print((resident("VmRSS") - before >> 20) - len(kept))
    del kept
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="another C library keeps nothing")
def test_freed_tensors_between_others_are_returned_where_the_next_ones_have_other_sizes() -> None:
    said = subprocess.run([sys.executable, "-c", PROGRAM], check=True, stdout=subprocess.PIPE, text=True)
    returned, kept = map(int, said.stdout.split())
    assert kept > 50
    assert returned < 5


def test_a_worker_keeps_freed_tensors_while_it_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[bool] = []
    monkeypatch.setattr(process, "keep_freed_tensors", said.append)
    spec = spec_of(1, 1, 0, inner__steps=1, inner__microbatches=1)
    worker = process.NodeWorker()
    worker.build(Build(spec, StageRange(0, 1), LocalData()))
    worker.connect(Connect(None, None))
    worker.begin_round(BeginRound(1, range(spec.samples_per_round())))
    assert said == [True]
    worker.forward(Forward(0, 0, None, 1))
    worker.backward(Backward(0, None))
    worker.apply(Apply(0, 1.0))
    assert said == [True]
    assert worker.end_inner_phase(EndInnerPhase()).result.loss > 0
    assert said == [True, False]
