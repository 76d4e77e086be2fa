"""Faults in real processes: killed and stopped nodes come back, and all anchors agree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coordinator.store.history import SqliteHistory
from coordinator.store.history_file import HISTORY_FILE
from coordinator.store.history_tables import Standing
from protocol.run_files.resolve import resolve
from protocol.spec.run import RunSpec
from protocol.types import PeerId, Role
from tests.support.fault_script import Action, Moment
from tests.support.faults import FaultPlan
from tests.support.processes import COORDINATOR, ProcessSwarm

pytestmark = pytest.mark.swarm

FULL = {"a": Role.REPLICA, "b": Role.REPLICA, "c": Role.REPLICA}
MIXED = {"a": Role.REPLICA, "p": Role.STAGE, "q": Role.STAGE}


def spec_of(members: dict[str, Role], rounds: int, **more: Any) -> RunSpec:
    stages = sum(role is Role.STAGE for role in members.values())
    return resolve(
        "nano",
        overrides={
            "rounds": rounds,
            # Rounds of half a second: a node that starts again misses only some of them.
            "inner.steps": 20,
            "swarm.replicas": len(members) - stages,
            "swarm.pipelines": stages // 2,
            "recovery.checkpoint_every": 2,
            "recovery.keep_rounds": 40,
            "timing.heartbeat": 1.0,
            "timing.lost_after": 6.0,
            **more,
        },
    )


@pytest.mark.slow  # the virtual swarm plays the same faults, and others here kill real nodes
def test_killed_nodes_and_one_with_a_wrong_clock_come_back_and_all_anchors_agree(tmp_path: Path) -> None:
    plan = FaultPlan(tmp_path / "faults")
    plan.fail_at("a", None, 3, Moment.INNER_STEP, Action.SKEW, seconds=600.0)
    plan.fail_at("a", 0, 3, Moment.PROPOSED, Action.KILL)
    plan.fail_at("b", 0, 5, Moment.SENDING, Action.KILL)
    plan.fail_at("c", 0, 7, Moment.GATHERED, Action.KILL)
    with ProcessSwarm(spec_of(FULL, 26), tmp_path, FULL, plan) as swarm:
        swarm.start()
        swarm.keep_running_to_the_end()
        plan.assert_all_fired()
        swarm.assert_all_agree()
        assert swarm.restarts == 3
        # The clock became wrong while the node ran. After the restart it was wrong from the start.
        assert swarm.log("a").count("set the clock of this machine") == 1
        assert all(26 in swarm.contributions(name) for name in FULL)


@pytest.mark.slow  # the virtual swarm plays the same faults in seconds
def test_nodes_come_back_after_a_stop_a_partition_and_a_kill_of_all_processes(tmp_path: Path) -> None:
    plan = FaultPlan(tmp_path / "faults")
    # It holds round 3 open while the coordinator is killed.
    plan.fail_at("p", None, 3, Moment.MATCHED, Action.DELAY, seconds=1.0)
    plan.fail_at("a", None, 6, Moment.INNER_STEP, Action.STOP, seconds=15.0)
    with ProcessSwarm(spec_of(MIXED, 120), tmp_path, MIXED, plan) as swarm:
        swarm.start()
        swarm.wait_fired("p", 90)
        swarm.kill(COORDINATOR)
        swarm.start_coordinator()

        swarm.wait_fired("a", 60)
        swarm.wait_until(lambda: swarm.times_lost("a") == 1, 60, "the loss of the stopped node")
        missed = swarm.round_number
        assert not swarm.contributions("a") & set(range(6, missed + 1))
        swarm.wait_until(
            lambda: max(swarm.contributions("a")) > missed, 90, "a payload of the node that was stopped"
        )

        for name in (*MIXED, COORDINATOR):
            swarm.kill(name)
        cut = swarm.round_number + 5
        plan.fail_at("a", None, cut, Moment.INNER_STEP, Action.PARTITION, seconds=11.0)
        swarm.start_coordinator()
        swarm.keep_running_to_the_end()
        plan.assert_all_fired()
        swarm.assert_all_agree()
        assert swarm.restarts == len(MIXED)
        assert not swarm.contributions("a") & {cut, cut + 1, cut + 2}
        assert all(120 in swarm.contributions(name) for name in MIXED)


@pytest.mark.slow  # the virtual swarm plays the same faults in seconds
def test_what_the_neighbour_of_a_dead_node_worker_or_machine_has_learned_counts_in_its_round(
    tmp_path: Path,
) -> None:
    plan, step, steps = FaultPlan(tmp_path / "faults"), 10, 20
    members = {**MIXED, "b": Role.REPLICA}
    plan.fail_at("q", None, None, Moment.NORM, Action.KILL, step=step)  # the node
    plan.fail_at("q", None, None, Moment.NORM, Action.DELAY, step=step, seconds=15.0)  # its worker, below
    plan.fail_at("q", None, None, Moment.NORM, Action.STOP, step=step, seconds=20.0)  # its machine, or line
    spec = spec_of(members, 400)
    timing = spec.timing.model_copy(update={"link": 4.0, "lost_after": 10.0})
    grouping = spec.grouping.model_copy(update={"balance": False})  # each replica has the same share
    spec = spec.model_copy(update={"timing": timing, "grouping": grouping})
    with ProcessSwarm(spec, tmp_path, members, plan) as swarm:
        swarm.start()
        for count in (1, 2, 3):
            swarm.keep_running_until(lambda of=count: len(plan.fired("q")) >= of, 180, f"fault {count}")
            number = plan.fired("q")[-1].round_number
            if count == 2:
                swarm.kill_below("q", swarm.worker_of("q"))
            swarm.keep_running_until(lambda at=number: swarm.round_number > at, 60, f"after {number}")
            shares = {name: share_of(swarm, name, number) for name in members}
            assert shares == {"a": 1.0, "b": 1.0, "p": step / steps, "q": None}
        swarm.keep_running_until(
            lambda: max(swarm.contributions("q"), default=0) > number, 180, "a payload of q after all"
        )
        plan.assert_all_fired()
        assert not [each for each in swarm.decisions() if not each["owners"]], "a round was lost"
        found = json.loads(swarm.ask("status", str(swarm.run), "--json"))
        assert found["anchors_agree"]


def share_of(swarm: ProcessSwarm, name: str, round_number: int) -> float | None:
    """The share of its inner phase behind the payload of a node, by its credit; None without one."""
    detail = SqliteHistory(swarm.run / HISTORY_FILE).peer(PeerId(swarm.peer(name)))
    full = swarm.spec.samples_per_round() * swarm.spec.model.context
    found = [
        each.tokens
        for each in (detail.contributions if detail else ())
        if each.round_number == round_number and each.standing is Standing.COUNTED
    ]
    return found[0] / full if found else None


@pytest.mark.slow  # the virtual swarm plays the same faults in seconds
@pytest.mark.parametrize("what", ["node", "worker"])
def test_a_spare_takes_the_seat_of_a_killed_home_within_the_round(tmp_path: Path, what: str) -> None:
    plan = FaultPlan(tmp_path / "faults")
    action = Action.KILL if what == "node" else Action.DELAY
    plan.fail_at("q", None, 2, Moment.NORM, action, step=40, seconds=0.5)
    spares = {"s": Role.STAGE, "t": Role.STAGE}
    shape = {"inner.steps": 400, "grouping.spares": 2, "timing.heartbeat": 0.5, "timing.lost_after": 2.0}
    spec = spec_of(MIXED, 3, **shape)
    with ProcessSwarm(spec, tmp_path, {**MIXED, **spares}, plan) as swarm:
        swarm.start_coordinator()
        for name in MIXED:
            swarm.start_node(name)
        swarm.wait_until(lambda: bool(swarm.events("plan")), 120, "the first plan")
        for name in spares:  # before that, any two of the four homes would make the pipeline
            swarm.start_node(name)
        swarm.wait_fired("q", 180)
        if what == "worker":
            swarm.worker_of("q").kill()
        swarm.keep_running_to_the_end()
        swarm.assert_all_agree(*"apst")
        assert [each["reason"] for each in swarm.events("plan") if "round 2 goes on" in each["reason"]]
        # The others have lost no round, and the spare contributes from the next one on.
        assert swarm.contributions("a") == swarm.contributions("p") == {1, 2, 3}
        assert 3 in swarm.contributions("s") | swarm.contributions("t")
