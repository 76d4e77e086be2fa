"""One run of two real nodes, in which most happens that a volunteer's machine and a coordinator live through.

It is one test because each swarm of real processes costs more than what is asked of it: nodes start before
their coordinator, outlive what is killed below them, find a coordinator that has moved, and leave in order.
"""

from __future__ import annotations

import re
import signal
from pathlib import Path

import psutil
import pytest

from node.checkpoint import global_model
from node.security.credentials import folder_of, load
from protocol.errors import ExitCode
from protocol.types import Role
from tests.builders import spec_of
from tests.support import commands
from tests.support.ports import free_port
from tests.support.processes import COORDINATOR, ProcessSwarm

pytestmark = pytest.mark.swarm

NODES = {"known": Role.REPLICA, "newcomer": Role.REPLICA}


def test_two_nodes_wait_train_outlive_what_is_killed_find_their_coordinator_and_leave(tmp_path: Path) -> None:
    # The test ends the run: a node that is slow to come is never too late.
    spec = spec_of(2, 2, 0, rounds=100_000, inner__steps=10, inner__microbatch_size=4)
    with ProcessSwarm(spec, tmp_path, NODES) as swarm:
        nodes_start_first_wait_and_then_train(swarm)
        settings_change_on_both_at_the_same_round(swarm)
        a_node_outlives_its_template_and_its_worker_and_computes_smaller_pieces(swarm)
        nodes_find_a_coordinator_that_listens_elsewhere(swarm)
        nodes_that_are_asked_to_leave_finish_their_round_first(swarm)
        assert not swarm.events("diverged")


def until_both_count(swarm: ProcessSwarm, after: int = 0) -> None:
    def is_so() -> bool:
        return any(len(each["owners"]) == 2 and each["round"] > after for each in swarm.decisions())

    swarm.wait_until(is_so, 240, "a round with payloads of both")


def finished(swarm: ProcessSwarm, name: str) -> int:
    """The last round that the node has finished."""
    return max(int(each) for each in re.findall(r"round (\d+) of \d+: ", swarm.log(name)))


def end_coordinator(swarm: ProcessSwarm) -> None:
    swarm.started[COORDINATOR].process.send_signal(signal.SIGINT)
    swarm.started[COORDINATOR].process.wait(60)


def nodes_start_first_wait_and_then_train(swarm: ProcessSwarm) -> None:
    swarm.start_coordinator("--one-port")
    swarm.start_node("known")
    swarm.wait_log("known", "joined run")  # it keeps its certificate; the run waits for one more replica
    swarm.kill("known")
    end_coordinator(swarm)
    for times in (1, 2):
        for name in NODES:
            swarm.start_node(name)
        for name in NODES:
            swarm.wait_log(name, "waiting for the coordinator", count=times)
        if times == 1:
            for name in NODES:
                swarm.started[name].process.send_signal(signal.SIGINT)
            ended = [swarm.started[name].process.wait(30) for name in NODES]
            assert ended == [ExitCode.INTERRUPTED] * 2
    swarm.start_coordinator("--one-port")
    until_both_count(swarm)
    for name in NODES:
        assert swarm.is_running(name), swarm.log(name)[-3000:]
        assert "the coordinator answers after" in swarm.log(name)


def settings_change_on_both_at_the_same_round(swarm: ProcessSwarm) -> None:
    change = ("--set", "inner.learning_rate=0.001", "--set", "inner.steps=9", "--reason", "a test")
    told = commands.hetnode("run", "change", str(swarm.run), *change)
    assert (told.returncode, told.stderr) == (0, "")
    found = re.fullmatch(r"from round (\d+) on: inner.learning_rate=0.001, inner.steps=9\n", told.stdout)
    assert found is not None, told.stdout
    until_both_count(swarm, after=int(found[1]))
    for name in NODES:
        assert f"round {found[1]} has other settings" in swarm.log(name)
        assert "has ended" not in swarm.log(name)  # no process had to start again


def a_node_outlives_its_template_and_its_worker_and_computes_smaller_pieces(swarm: ProcessSwarm) -> None:
    name = "newcomer"
    main = swarm.started[name].process.pid

    def kill_and_go_on(process: psutil.Process) -> None:
        swarm.kill_below(name, process)
        before = swarm.round_number
        swarm.wait_until(
            lambda: max(swarm.contributions(name)) > before + 1, 240, "a payload after the death"
        )

    (template,) = (each for each in swarm.started[name].tree() if each.name() == "template")
    kill_and_go_on(template)
    assert "pieces" not in swarm.log(name)
    kill_and_go_on(swarm.worker_of(name))
    swarm.wait_log(name, "a microbatch is computed in 2 pieces", count=1)
    assert swarm.started[name].process.pid == main
    assert swarm.is_running(name)


def nodes_find_a_coordinator_that_listens_elsewhere(swarm: ProcessSwarm) -> None:
    end_coordinator(swarm)
    before = swarm.round_number
    swarm.start_coordinator("--one-port", "--listen", f"127.0.0.1:{free_port()}")
    until_both_count(swarm, before)
    address = (swarm.run / "address").read_text()
    for name in NODES:
        assert swarm.is_running(name), swarm.log(name)[-3000:]
        assert load(folder_of(swarm.folder / name / "identity.key", swarm.run_id)).api == address


def nodes_that_are_asked_to_leave_finish_their_round_first(swarm: ProcessSwarm) -> None:
    lost, decided = swarm.times_lost("known"), swarm.round_number
    # A node that still believes its coordinator away would leave at once.
    swarm.wait_until(lambda: finished(swarm, "known") > decided, 60, "a round with the coordinator")
    left = commands.hetnode("leave", str(swarm.folder / "known"), check=True)
    assert "the node has left" in left.stdout
    swarm.wait_over(60, "known")  # with status 0
    assert "finishes its round first" in swarm.log("known")
    # The request may have come between the first decision of a round and the end of that round.
    assert max(swarm.contributions("known")) == finished(swarm, "known")
    assert swarm.times_lost("known") == lost
    swarm.wait_round(swarm.round_number + 3, 60)
    commands.hetnode("leave", str(swarm.folder / "newcomer"), "--now", check=True)
    swarm.wait_until(lambda: swarm.status("newcomer") == ExitCode.INTERRUPTED, 60, "the end of the last node")
    assert global_model.latest(swarm.folder / "newcomer" / "checkpoint") is not None
