"""A run with Nesterov momentum and radial updates: after kills, late joiners and recovery all bits agree."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from node.data.stream import open_stream
from node.experiment.in_process_swarm import LocalSwarm
from protocol.types import Role
from tests.support.fault_script import Action, Moment
from tests.support.faults import FaultPlan
from tests.support.running_replica import spec_of
from tests.virtual.scenario import MIXED, Play, contributions, return_after
from tests.virtual.swarm import VirtualSwarm

ROUNDS = 9


def final_tensors(swarm: VirtualSwarm, name: str) -> dict[str, Tensor]:
    task = swarm.nodes[name].task
    assert task is not None
    files = task.result().glob("stage-*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def test_kills_late_joiners_and_recovery_leave_all_momenta_equal(play: Play, plan: FaultPlan) -> None:
    plan.fail_at("b", 0, 2, Moment.DECIDED, Action.KILL)
    plan.fail_at("q", None, 4, Moment.INNER_STEP, Action.KILL)

    async def disturbed(swarm: VirtualSwarm) -> None:
        await return_after(swarm, "b", 5)  # from its checkpoint, and by replay
        await return_after(swarm, "q", 5)  # follows the embedding, with its momentum
        await swarm.until_round(5)
        swarm.start("late")  # from a checkpoint of others

    settings = {"outer.optimizer": "nesterov", "outer.merge": "radial", "inner.microbatches": 1}
    swarm = play.to_the_end(disturbed, MIXED, ROUNDS, later={"late": Role.REPLICA}, **settings)
    assert contributions(swarm, "late")[-1] == contributions(swarm, "b")[-1] == ROUNDS
    whole = final_tensors(swarm, "a")
    parameters = {name for name in whole if "/" not in name}
    assert whole.keys() - parameters == {f"{name}/momentum" for name in parameters}
    for name in ("b", "late", "p", "q"):
        found = final_tensors(swarm, name)
        assert all(torch.equal(tensor, whole[key]) for key, tensor in found.items()), name
    assert len({swarm.trainer(name).outer.embedding_digest() for name in swarm.nodes}) == 1


def test_an_experiment_with_nesterov_learns_and_is_saved_with_its_momentum(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    short = {
        "rounds": 8,
        "swarm.replicas": 1,
        "inner.steps": 3,
        "inner.microbatches": 1,
        "inner.warmup_steps": 2,
    }
    spec = spec_of(**short, **{"outer.optimizer": "nesterov", "outer.overlap": 1})
    stream = open_stream(spec)
    swarm, resumed = (LocalSwarm(spec, stream=stream, resident=1) for _ in range(2))
    before = swarm.validate()
    for _ in range(7):
        swarm.train_round()
    swarm.save(tmp_path)
    assert resumed.restore(tmp_path)
    assert resumed.train_round() == swarm.train_round()
    after = swarm.validate()
    assert resumed.validate() == after
    assert all(late < early - 0.3 for late, early in zip(after, before, strict=True))
    assert resumed.replicas[0].host_of(0).outer[0].committed["emb/momentum"].any()
