"""What a worker holds of main memory."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

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
