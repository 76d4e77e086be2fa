"""Settings of the interpreter in the process of a coordinator."""

from __future__ import annotations

import gc
import subprocess
import sys


def test_a_coordinator_seldom_collects_all_objects_and_soon_gives_way_to_its_event_loop() -> None:
    # A process of its own: the settings are of the whole interpreter.
    program = "import gc, sys; from coordinator.app import answer_quickly; answer_quickly(); print({})"
    shown = "sys.getswitchinterval(), *gc.get_threshold()"
    result = subprocess.run(
        [sys.executable, "-c", program.format(shown)], capture_output=True, text=True, check=True
    )
    seconds, *thresholds = map(float, result.stdout.split())
    assert seconds < 0.001 < sys.getswitchinterval()
    assert thresholds[0] > 10 * gc.get_threshold()[0]
