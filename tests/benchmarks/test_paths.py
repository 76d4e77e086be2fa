"""Paths through the holders of stages: with those of chains, they train what the replicas of a plan do."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.paths import HOLDERS, ROWS, SLOTS, STAGES, Row, Swarm, spec_of
from node.core.worker.compute import Compute
from node.data.stream import open_stream
from node.experiment.in_process_replica import LocalReplica, plan_of
from node.experiment.in_process_swarm import LocalSwarm
from protocol.math.sampling import sample_range
from protocol.spec.run import RunSpec


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_each_holder_gets_its_share_of_the_microbatches(row: Row) -> None:
    paths = row.paths(seed=1, round_number=2, step=3)
    assert paths.shape == (SLOTS, STAGES)
    for stage in range(STAGES):
        assert tuple(np.bincount(paths[:, stage], minlength=HOLDERS)) == row.shares
    assert bool((paths == row.paths(1, 2, 4)).all()) == (row.drawn != "step")
    assert bool((paths == row.paths(1, 3, 3)).all()) == (row.drawn is None)


def test_paths_of_chains_give_the_anchors_of_the_plan_bit_for_bit() -> None:
    # With one step in a round a replica has the same samples in both, and bf16 has no dithers.
    tree = spec_of(seed=0, steps=1, total=2).tree
    tree["link"] |= {"dtype": "bf16", "gradient_dtype": "bf16"}
    spec = RunSpec.from_tree(tree)
    stream, plan = open_stream(spec), plan_of(spec)
    replicas = [LocalReplica(spec, each, Compute(), stream) for each in plan.replicas]
    swarm = Swarm(spec, ROWS[0], stream, replicas)
    expected = LocalSwarm(spec, stream=stream)
    for number in (1, 2):
        swarm.round(number, [sample_range(plan, spec, number, each.index) for each in plan.replicas])
        expected.train_round()
    for stage in range(STAGES):
        mine, theirs = (each[0].host_of(stage).outer[stage] for each in (replicas, expected.replicas))
        assert mine.digest() == theirs.digest()
