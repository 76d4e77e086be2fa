"""What tests start ends with the process of the tests, also when that is killed."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress

import psutil
import pytest

from tests.support.waiting import is_alive, wait_until

SECONDS = 60.0
TESTS = """
import subprocess, sys, time
from node.ipc.template import Template
from tests.support import watchdog

watchdog.start()
forked = Template.start([]).fork("tests.support.forked_process", ["sleep"], with_template=True)
started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(forked.pid, started.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the watchdog reads /proc")
def test_what_killed_tests_have_started_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", TESTS], stdout=subprocess.PIPE, text=True) as tests:
        assert tests.stdout is not None
        # A forked process shares the output: the pids may come after what it prints.
        lines = (line.split() for line in tests.stdout)
        pids = next(line for line in lines if len(line) == 2)
        left = [psutil.Process(int(pid)) for pid in pids]
        try:
            assert all(map(is_alive, left))
            tests.kill()
            wait_until(lambda: not any(map(is_alive, left)), SECONDS, "the end of what was started")
        finally:
            for each in left:
                with suppress(psutil.NoSuchProcess):
                    each.kill()
