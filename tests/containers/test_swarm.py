"""Swarms in containers: a user starts, stops, scales and starts them again; and faults of the engine."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch

from node.checkpoint.global_model import Checkpoint
from tests.containers.swarm import PROJECT, START_SECONDS, TAG, ContainerSwarm
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.containers, pytest.mark.timeout(1800)]

ROUNDS = 120
FEW_ROUNDS = 40
"""A full replica alone takes a second for each: enough for the others to come back before the end."""


def test_up_down_and_up_again_until_the_run_is_finished_and_then_another_run(
    swarm: ContainerSwarm, tmp_path: Path
) -> None:
    swarm.settings |= {"HETNODE_PRESET": "nano", "HETNODE_OPTIONS": f"--rounds {FEW_ROUNDS}"}
    swarm.compose("up", "--detach")
    swarm.wait_rounds(2, {0, 1})
    peers = peers_of(swarm)
    assert len(peers) == 3
    swarm.compose("down")
    swarm.compose("up", "--detach")
    swarm.wait_rounds(1, {0, 1})
    assert peers_of(swarm) == peers, "the same nodes come back"
    swarm.wait_ended(START_SECONDS)
    check_equal(swarm.models(tmp_path / "first"), FEW_ROUNDS)

    said = swarm.compose("up")  # and not in the background: it ends by itself
    assert f"is finished: {FEW_ROUNDS} rounds are decided" in said
    assert "another --folder" in said
    assert said.count("This node's part of the model is in") == 3

    run = known_run(swarm)
    swarm.compose("run", "--rm", "replica", "export", run, "model")
    swarm.compose("cp", "replica:/home/hetnode/model", str(tmp_path / "model"))
    assert json.loads((tmp_path / "model" / "config.json").read_text())["architectures"] == [
        "LlamaForCausalLM"
    ]

    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "corpus.txt").write_text("".join(f"line {line}\n" for line in range(20_000)))
    swarm.settings |= {"HETNODE_RUN": "second", "HETNODE_OPTIONS": "--rounds 3"}
    swarm.settings |= {"HETNODE_FILES": str(tmp_path / "files"), "HETNODE_DATA": "text:/files/corpus.txt"}
    swarm.compose("up", "--detach")
    swarm.wait_ended(START_SECONDS)
    check_equal(swarm.models(tmp_path / "second"), 3)


def test_killed_crashed_cut_off_and_scaled(swarm: ContainerSwarm, tmp_path: Path) -> None:
    swarm.settings |= {"HETNODE_PRESET": "nano", "HETNODE_OPTIONS": f"--rounds {ROUNDS} --inner-steps 20"}
    swarm.compose("up", "--detach")
    swarm.wait_rounds(2, {0, 1})
    swarm.wait_healthy("coordinator", "replica", "stage")
    peers = peers_of(swarm)

    # The engine does not start a container again that a person has killed.
    killed = f"{PROJECT}-stage-1"
    swarm.docker("kill", killed)
    swarm.wait_rounds(2, {0})
    assert restarts_of(swarm, killed) == 0
    swarm.compose("up", "--detach")
    swarm.wait_rounds(1, {0, 1})

    # A process that dies is started again.
    crashed = f"{PROJECT}-replica-1"
    os.kill(int(swarm.docker("inspect", "--format", "{{.State.Pid}}", crashed)), signal.SIGKILL)
    wait_until(lambda: restarts_of(swarm, crashed) == 1, START_SECONDS, "the restart of the replica")
    swarm.wait_rounds(1, {0, 1})
    assert peers_of(swarm) == peers

    cut, network = f"{PROJECT}-stage-2", f"{PROJECT}_default"
    former = address_of(swarm, cut)
    swarm.docker("network", "disconnect", network, cut)
    swarm.wait_rounds(2, {0})
    reconnect_elsewhere(swarm, cut, network)
    assert address_of(swarm, cut) != former
    swarm.wait_rounds(1, {0, 1})

    # Six stage nodes are three pipelines; and back to one.
    swarm.compose("up", "--detach", "--scale", "stage=6")
    swarm.wait_rounds(1, {0, 1, 2, 3})
    assert len(peers_of(swarm)) == 7
    for stage in range(1, 7):
        swarm.docker("exec", f"{PROJECT}-stage-{stage}", "hetnode", "health")
    swarm.compose("up", "--detach", "--scale", "stage=2")
    # The two that are left keep the number of the pipeline in which they were.
    swarm.wait_rounds(1, {0}, number=2)

    swarm.compose("stop")
    assert {each.state for each in swarm.containers()} == {"exited"}
    swarm.compose("start")
    swarm.wait_rounds(1, {0}, number=2)
    assert len(peers_of(swarm)) == 7, "no container took a new identity"
    swarm.wait_ended(2 * START_SECONDS)
    check_equal(swarm.models(tmp_path), ROUNDS)


def peers_of(swarm: ContainerSwarm) -> set[str]:
    """The peers that have measured something so far."""
    return {each["peer"] for each in swarm.events() if each["event"] == "measurement"}


def known_run(swarm: ContainerSwarm) -> str:
    """The name of the run in which the full replica was."""
    folder = ".config/hetnode/peer-0.runs"
    return swarm.compose("run", "--rm", "--entrypoint", "ls", "replica", folder).strip()


def restarts_of(swarm: ContainerSwarm, container: str) -> int:
    return int(swarm.docker("inspect", "--format", "{{.RestartCount}}", container))


def address_of(swarm: ContainerSwarm, container: str) -> str:
    (network,) = json.loads(swarm.docker("inspect", container))[0]["NetworkSettings"]["Networks"].values()
    return str(network["IPAddress"])


def reconnect_elsewhere(swarm: ContainerSwarm, container: str, network: str) -> None:
    """Connect it with another address than before, which another container may have meanwhile."""
    other = (
        "run",
        "--detach",
        "--rm",
        "--network",
        network,
        "--entrypoint",
        "sleep",
        f"hetnode:{TAG}",
        "600",
    )
    holder = swarm.docker(*other).strip()
    try:
        swarm.docker("network", "connect", network, container)
    finally:
        swarm.docker("rm", "--force", holder)


def check_equal(models: list[Checkpoint], round_number: int) -> None:
    """The nodes that were there at the end hold all stages after this round, with the same bits."""
    last = [each for each in models if each.round_number == round_number]
    assert len(last) >= 3, [each.round_number for each in models]
    for stage in range(2):
        held = [each.stages[stage] for each in last if stage in each.stages]
        assert len(held) >= 2
        for parameters in held[1:]:
            assert parameters.keys() == held[0].keys()
            assert all(torch.equal(parameters[name], held[0][name]) for name in held[0])
