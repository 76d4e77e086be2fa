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
# Its output goes elsewhere: here it could come into the middle of the line of the pids.
template = Template.start([])
forked = template.fork("tests.support.forked_process", ["sleep"], stdout=2, with_template=True)
started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(forked.pid, started.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the watchdog reads /proc")
def test_what_killed_tests_have_started_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", TESTS], stdout=subprocess.PIPE, text=True) as tests:
        left: list[psutil.Process] = []
        try:
            assert tests.stdout is not None
            left = [psutil.Process(int(pid)) for pid in tests.stdout.readline().split()]
            assert len(left) == 2
            assert all(map(is_alive, left))
            tests.kill()
            wait_until(lambda: not any(map(is_alive, left)), SECONDS, "the end of what was started")
        finally:
            tests.kill()  # otherwise the block would wait for it
            for each in left:
                with suppress(psutil.NoSuchProcess):
                    each.kill()
