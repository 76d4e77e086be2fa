"""No second copy of a stage: not where its state is restored, loaded, written, handed on or exported."""

from __future__ import annotations

import pytest

from benchmarks.resident import CLEAR
from benchmarks.state_memory import measured

MOST = {
    "propose": 4.7,  # the pending error feedback
    "screen and commit of 8 payloads": 6.0,  # the new anchor, and the payloads
    "digest": 0.5,
    "write a checkpoint": 0.5,
    "restore at a start": 9.0,  # the moments, which are new
    "load what was fetched": 1.0,
    "put the stages of a model together": 1.5,
    "export the model": 1.5,
}
"""Bytes for each parameter, of tensors of up to a fourth of a byte for each."""


@pytest.mark.slow
@pytest.mark.skipif(not CLEAR.exists(), reason="no peak of memory from a moment on")
def test_no_second_copy_of_a_stage_is_in_memory() -> None:
    peaks = {operation: float(peak) for operation, peak, _ in measured(50_000_000).rows}
    assert {operation for operation, most in MOST.items() if peaks[operation] > most} == set()
