"""The benchmarks of inner steps, on a model that takes no time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks import mfu
from benchmarks.inner_loop import LOOPS, Step, Turn, modules_step, replica_step, rows_of, spec_of, timed
from node.core.worker.compute import Compute
from protocol.run_files.resolve import resolve
from protocol.spec.run import RunSpec

TINY = resolve("nano", overrides={"swarm.stages": 1, "swarm.replicas": 1, "swarm.pipelines": 0})


@pytest.mark.parametrize("make", [replica_step, modules_step])
def test_a_loop_takes_one_step_after_another(make: Callable[[RunSpec, Compute], Step]) -> None:
    assert make in LOOPS.values()
    step = make(TINY, Compute())
    assert all(timed(step, "cpu").wall > 0 for _ in range(2))


def test_a_ratio_is_the_median_of_the_turns() -> None:
    ours = [Turn(1.0, 1.0), Turn(2.0, 1.0), Turn(1.0, 1.0)]
    theirs = [Turn(1.5, 1.1), Turn(3.0, 1.2), Turn(9.0, 1.3)]
    rows = list(
        rows_of(TINY, "tiny", {"replica": ours, "modules": theirs}, {"replica": 10**6, "modules": 2 * 10**6})
    )
    assert [(row[1], *row[3:]) for row in rows] == [
        ("replica", "1.00", "1.00", "1"),
        ("modules", "1.50", "1.20", "2"),
    ]


def test_the_sizes_are_those_of_their_names() -> None:
    for name, millions in (("10m", 10.6), ("100m", 98.7)):
        assert spec_of(name).parameters_of(0) / 1e6 == pytest.approx(millions, rel=0.01)


def test_mfu_counts_six_operations_per_weight_and_the_attention() -> None:
    spec = resolve("1b")
    matrices = spec.model.layer_matrices * spec.model.layers + spec.model.vocabulary * spec.model.width
    attention = 12 * spec.model.context * spec.model.query_width * spec.model.layers
    tokens = 8 * 4 * 1024
    flops = tokens * (6 * matrices + attention)
    assert mfu.utilization(spec, flops / 989e12, 989.0) == pytest.approx(1)
    assert mfu.peak_tflops("NVIDIA H100 80GB HBM3") == 989
    assert mfu.peak_tflops("NVIDIA H100 PCIe") == 756
    assert mfu.peak_tflops("unknown") is None
