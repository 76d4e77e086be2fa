"""Scripted faults strike when planned, once, in whichever process comes there first, and say so before."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.support.fault_script import Action, Moment, Script
from tests.support.faults import FaultPlan
from tests.support.waiting import wait_until

CHILD = """
import asyncio
from node import hooks
from protocol.pb.hetnode_pb2 import MatchRequest, PayloadDescriptor

async def rounds():
    for number in range(1, 4):
        print("round", number, flush=True)
        request = MatchRequest(descriptor=PayloadDescriptor(round=number, stage=0))
        await hooks.current().after_coordinator_call("Match", request)
    print("end", flush=True)

asyncio.run(rounds())
"""
WITH_CHILD = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}])
print("pid", child.pid, flush=True)
child.wait()
"""


def run(plan: FaultPlan, program: str = CHILD) -> subprocess.Popen[str]:
    """A process that plays the member `a`."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HETNODE_")}
    return subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        env={**environment, **plan.environment("a")},
    )


@pytest.fixture
def plan(tmp_path: Path) -> FaultPlan:
    return FaultPlan(tmp_path)


def test_kill_ends_the_process_at_the_planned_moment_and_the_report_says_so(plan: FaultPlan) -> None:
    plan.fail_at("a", 0, 2, Moment.MATCHED, Action.KILL)
    with run(plan) as process:
        output, _ = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert output.splitlines() == ["round 1", "round 2"]
    plan.assert_all_fired()
    (fired,) = plan.fired("a")
    assert (fired.at, fired.action, fired.stage, fired.round_number) == ("matched", "kill", 0, 2)


def test_what_has_fired_does_not_fire_again_after_a_restart(plan: FaultPlan) -> None:
    plan.fail_at("a", 0, 2, Moment.MATCHED, Action.KILL)
    for expected in (-signal.SIGKILL, 0):
        with run(plan) as process:
            process.communicate(timeout=60)
        assert process.returncode == expected
    assert len(plan.fired("a")) == 1


def test_a_kill_in_a_child_ends_the_main_process_of_the_node(plan: FaultPlan) -> None:
    # The child inherits the process id of the main process, whose hooks were installed first.
    plan.fail_at("a", None, 1, Moment.MATCHED, Action.KILL)
    with run(plan, WITH_CHILD) as process:
        output, _ = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert "round 2" not in output
    plan.assert_all_fired()


def test_stop_suspends_the_whole_tree_and_continues_it_after_its_time(plan: FaultPlan) -> None:
    plan.fail_at("a", 0, 2, Moment.MATCHED, Action.STOP, seconds=1.0)
    with run(plan, WITH_CHILD) as process:
        main = psutil.Process(process.pid)

        def stopped() -> bool:
            others = main.children(recursive=True)
            tree = [main, *(each for each in others if "tests.support.fault_script" not in each.cmdline())]
            return len(tree) == 2 and all(p.status() == psutil.STATUS_STOPPED for p in tree)

        wait_until(stopped, 30, "both processes to be stopped")
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert output.splitlines()[-1] == "end"
    plan.assert_all_fired()


def test_delay_holds_up_the_moment_alone(plan: FaultPlan) -> None:
    plan.fail_at("a", 0, None, Moment.MATCHED, Action.DELAY, seconds=0.05, times=2)

    script = script_of(plan)

    async def order() -> list[int]:
        done: list[int] = []

        async def one(number: int) -> None:
            await script.reach(Moment.MATCHED, number, 0)
            done.append(number)

        await asyncio.gather(one(1), one(2), one(3))
        return done

    assert asyncio.run(order())[0] == 3  # it strikes twice; the third task passes the two that sleep
    assert len(plan.fired("a")) == 1


class RecordingControl:
    def __init__(self) -> None:
        self.struck: list[object] = []

    def kill(self) -> None:
        self.struck.append("kill")

    def stop(self, seconds: float) -> None:
        self.struck.append(("stop", seconds))

    def pause(self, seconds: float) -> None:
        self.struck.append(("pause", seconds))


def script_of(plan: FaultPlan, clock: Callable[[], float] = time.time) -> Script:
    return Script(plan.faults_of("a"), plan.report_of("a"), RecordingControl(), clock)


def test_faults_fit_their_stage_round_and_moment_only(plan: FaultPlan) -> None:
    plan.fail_at("a", 1, 3, Moment.SENDING, Action.CORRUPT)
    script = script_of(plan)
    misses = [(Moment.SENDING, 3, 0), (Moment.SENDING, 2, 1), (Moment.MATCHED, 3, 1)]
    assert [script.reach_now(*miss) for miss in misses] == [None] * 3
    with pytest.raises(AssertionError, match="a: corrupt at sending stage 1 round 3"):
        plan.assert_all_fired()
    assert script.reach_now(Moment.SENDING, 3, 1) == plan.faults_of("a")[0]
    assert script.reach_now(Moment.SENDING, 3, 1) is None
    plan.assert_all_fired()


def test_two_processes_of_a_node_share_one_report(plan: FaultPlan) -> None:
    plan.fail_at("a", None, None, Moment.SENDING, Action.DROP)
    first, second = script_of(plan), script_of(plan)
    assert first.reach_now(Moment.SENDING, 1, 0) is not None
    assert second.reach_now(Moment.SENDING, 1, 1) is None
    assert len(plan.fired("a")) == 1


def test_a_partition_lasts_its_time_and_a_skew_for_ever_in_all_processes_of_the_node(plan: FaultPlan) -> None:
    now = 100.0
    plan.fail_at("a", None, 2, Moment.INNER_STEP, Action.PARTITION, seconds=5)
    plan.fail_at("a", None, 2, Moment.MATCHED, Action.SKEW, seconds=600)
    script, other = script_of(plan, lambda: now), script_of(plan, lambda: now)
    assert not other.is_cut_off()
    assert other.skew() == 0
    script.reach_now(Moment.INNER_STEP, 2, None)
    script.reach_now(Moment.MATCHED, 2, 0)
    assert other.is_cut_off()
    assert other.skew() == 600
    now += 5
    assert not other.is_cut_off()
    assert other.skew() == 600


def test_a_process_without_a_script_has_hooks_that_do_nothing() -> None:
    program = """
import sys
from node import hooks
assert type(hooks.current()) is hooks.Hooks
sys.exit(any(name.startswith(("tests", "torch", "psutil", "hivemind", "grpc")) for name in sys.modules))
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HETNODE_")}
    assert subprocess.run([sys.executable, "-c", program], check=False, env=environment).returncode == 0
