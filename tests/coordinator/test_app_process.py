"""Settings of the process of a coordinator. Each test has one of its own: they are of the whole process."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PREPARE = (
    "import ctypes, gc, sys, threading; from protocol.server.busy_process import prepare_process; "
    "prepare_process()"
)
ALLOCATE = """
ready, done = threading.Barrier(5), threading.Event()
def hold():
    held = [bytearray(2000) for _ in range(100)]
    ready.wait()
    done.wait()
for _ in range(4):
    threading.Thread(target=hold).start()
ready.wait()
ctypes.CDLL(None).malloc_stats()
done.set()
"""


def ran(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)


def test_a_coordinator_seldom_collects_all_objects_and_soon_gives_way_to_its_event_loop() -> None:
    result = ran(f"{PREPARE}\nprint(sys.getswitchinterval(), *gc.get_threshold())")
    seconds, *thresholds = map(float, result.stdout.split())
    assert seconds < 0.001 < sys.getswitchinterval()
    usual = ran("import gc; print(gc.get_threshold()[0])")  # the tests have another one
    assert thresholds[0] >= 10 * float(usual.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc gives threads heaps of their own")
def test_all_threads_of_a_coordinator_share_one_heap() -> None:
    usual = ran(f"import ctypes, threading\n{ALLOCATE}")
    assert usual.stderr.count("Arena") > 1
    assert ran(f"{PREPARE}\n{ALLOCATE}").stderr.count("Arena") == 1
