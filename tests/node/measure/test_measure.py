"""What a node measures of itself: operations, speed and memory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from node.core.worker.compute import Compute
from node.ipc.worker_calls import CheckDevice, ComputeOptions, FormGroup, MeasureSpeed
from node.machine import speed
from node.machine.machine import OwnMachine
from node.measure.measure import (
    describe_capacity,
    known_speed,
    measure_speed,
    tokens_per_second,
    training_speed,
)
from node.net.live_estimates import LiveEstimates
from node.ranks.group import RankGroup
from protocol.errors import ErrorCode, HetnodeError
from protocol.math.flops import layer_flops, microbatch_flops, tokens_of_microbatch
from protocol.run_files.resolve import resolve
from protocol.types import Capacity

SPEC = resolve("nano")


CAPACITY = Capacity("cpu", 3 * 2**30, 2)


class FakeWorker:
    """Computes at 5 GFLOP/s, or raises."""

    def __init__(self, error: Exception | None = None, ranks: int = 1) -> None:
        self.error, self.calls, self.ranks = error, 0, ranks

    async def call(self, request: MeasureSpeed) -> float:
        assert request.spec.preset in ("nano", "tiny")
        self.calls += 1
        if self.error:
            raise self.error
        return 5e9


# Operations


@pytest.mark.parametrize("preset", ["nano", "tiny", "178m", "1b"])
def test_operations_are_those_of_the_matrices_and_of_attention(preset: str) -> None:
    spec = resolve(preset, overrides={"inner.optimizer": "adamw"})
    model, stages = spec.model, range(spec.swarm.stages)
    vectors = (2 * model.layers + 1) * model.width
    embedding = model.vocabulary * model.width
    matrices = sum(spec.parameters_of(stage) for stage in stages) - vectors - embedding
    attention = 12 * model.layers * model.context * model.width
    assert microbatch_flops(spec, stages) == (6 * matrices + attention) * tokens_of_microbatch(spec)
    assert sum(microbatch_flops(spec, (stage,)) for stage in stages) == microbatch_flops(spec, stages)
    assert layer_flops(spec, model.layers) < microbatch_flops(spec, stages)


def test_tokens_per_second_of_a_stage_follow_from_its_operations() -> None:
    seconds = microbatch_flops(SPEC, (0,)) / 1e9
    assert tokens_per_second(SPEC, 0, 1e9) == pytest.approx(tokens_of_microbatch(SPEC) / seconds)


# Computing


def test_the_worker_measures_the_layers_of_a_run_before_it_builds_any() -> None:
    worker = OwnMachine()
    assert worker.check_device(CheckDevice(ComputeOptions("cpu"))).free_bytes == 0
    assert 0 < worker.measure_speed(MeasureSpeed(SPEC, "cpu", seconds=0.01)) < 1e15


@pytest.mark.parametrize("fails_here", [True, False])
def test_no_rank_awaits_the_speed_of_one_that_cannot_be_measured(
    monkeypatch: pytest.MonkeyPatch, fails_here: bool
) -> None:
    failure = HetnodeError(ErrorCode.DEVICE_UNAVAILABLE, "No memory.", "Free some.")
    told = b"" if fails_here else b"device-unavailable\0No memory.\0Free some."

    class TwoRanks(RankGroup):
        def exchange(self, data: bytes) -> list[bytes]:
            return [data, told]

        def totals(self, values: Sequence[float]) -> list[float]:
            raise AssertionError("the other rank does not come")

    def measured(*_: object) -> float:
        if fails_here:
            raise failure
        return 5e9

    monkeypatch.setattr("node.machine.machine.form_group", lambda *_: TwoRanks(0, 2))
    monkeypatch.setattr("node.machine.machine.layer_speed", measured)
    worker = OwnMachine()
    worker.form_group(FormGroup(0, 2, "cpu", "127.0.0.1", 1))
    with pytest.raises(HetnodeError) as refused:
        worker.measure_speed(MeasureSpeed(SPEC, "cpu", seconds=0.01))
    assert refused.value.code is ErrorCode.DEVICE_UNAVAILABLE


def test_a_device_that_cannot_compute_is_refused() -> None:
    with pytest.raises(HetnodeError) as refused:
        OwnMachine().measure_speed(MeasureSpeed(SPEC, "nonsense", seconds=0.01))
    assert refused.value.code is ErrorCode.DEVICE_UNAVAILABLE


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("short of memory\nand more")])
def test_a_device_without_enough_memory_is_refused(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*_: object) -> float:
        raise error

    monkeypatch.setattr(speed, "LlamaBlock", fail)
    with pytest.raises(HetnodeError) as refused:
        speed.layer_speed(SPEC, Compute("cpu"), 0.01)
    assert refused.value.code is ErrorCode.DEVICE_UNAVAILABLE
    assert "and more" not in refused.value.cause


async def test_a_speed_is_measured_once_for_each_spec_device_and_number_of_threads(tmp_path: Path) -> None:
    worker: Any = FakeWorker()
    for _ in range(3):
        assert await training_speed(worker, SPEC, "cpu", 2, tmp_path) == 5e9
    assert worker.calls == 1
    await training_speed(worker, SPEC, "cpu", 1, tmp_path)
    await training_speed(worker, SPEC, "cuda", 2, tmp_path)
    await training_speed(worker, resolve("tiny"), "cpu", 2, tmp_path)
    assert worker.calls == 4


async def test_the_speed_of_several_ranks_is_not_that_of_their_first_device(tmp_path: Path) -> None:
    one, two = FakeWorker(), FakeWorker(ranks=2)
    for worker in (one, two, one, two):
        await training_speed(worker, SPEC, "cuda:0", 2, tmp_path)  # type: ignore[arg-type]
    assert (one.calls, two.calls) == (1, 1)
    assert known_speed(tmp_path, SPEC.name, "cuda:0", 2, ranks=3) == 0.0


@pytest.mark.parametrize(
    "damaged", [b"", b"\xff", b"[]", b"3", b'{"a": "b"}', b'{"a": NaN}', b'{"a": -1}', b'{"a": []}']
)
async def test_a_damaged_file_of_speeds_is_replaced(tmp_path: Path, damaged: bytes) -> None:
    worker: Any = FakeWorker()
    (tmp_path / "speed.json").write_bytes(damaged)
    for _ in range(2):
        assert await training_speed(worker, SPEC, "cpu", 2, tmp_path) == 5e9
    assert worker.calls == 1


async def test_a_speed_that_was_measured_before_is_found_by_the_name_of_the_run(tmp_path: Path) -> None:
    worker: Any = FakeWorker()
    assert known_speed(tmp_path, SPEC.name, "cpu", 2) == 0.0
    await training_speed(worker, SPEC, "cpu", 2, tmp_path)
    assert known_speed(tmp_path, SPEC.name, "cpu", 2) == 5e9
    estimates = LiveEstimates(replace(CAPACITY, flops=3e9))
    await measure_speed(worker, SPEC, "cpu", 2, tmp_path, estimates)
    assert estimates.capacity.flops == 3e9, "what is known already, perhaps from training, stays"


async def test_at_most_32_speeds_are_kept(tmp_path: Path) -> None:
    worker: Any = FakeWorker()
    for threads in range(100):
        await training_speed(worker, SPEC, "cpu", threads, tmp_path)
    assert len(json.loads((tmp_path / "speed.json").read_text())) == 32
    assert [path.name for path in tmp_path.iterdir()] == ["speed.json"]


async def test_a_folder_that_cannot_be_written_only_loses_the_stored_speed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    worker: Any = FakeWorker()
    assert await training_speed(worker, SPEC, "cpu", 2, tmp_path / "file") == 5e9


async def test_a_machine_that_cannot_be_measured_takes_part_without_a_speed(tmp_path: Path) -> None:
    estimates = LiveEstimates(CAPACITY)
    for error in (
        HetnodeError(ErrorCode.DEVICE_UNAVAILABLE, "No memory.", "Free some."),
        RuntimeError("worker: IndexError()"),  # an unexpected error of the worker
    ):
        worker: Any = FakeWorker(error)
        await measure_speed(worker, SPEC, "cpu", 2, tmp_path, estimates)
        assert estimates.capacity == CAPACITY
    for code in (ErrorCode.WORKER_DIED, ErrorCode.RANK_FAILED):  # ranks out of step cannot go on
        dead: Any = FakeWorker(HetnodeError(code, "Dead.", ""))
        with pytest.raises(HetnodeError):
            await measure_speed(dead, SPEC, "cpu", 2, tmp_path, estimates)


async def test_a_measured_speed_is_sent_to_the_coordinator(tmp_path: Path) -> None:
    estimates = LiveEstimates(CAPACITY)
    worker: Any = FakeWorker()
    await measure_speed(worker, SPEC, "cpu", 2, tmp_path, estimates)
    news = estimates.due(0.0)
    assert news is not None
    assert news.capacity.flops == 5e9
    assert "5.0 GFLOP/s" in describe_capacity(estimates.capacity)


def test_a_description_of_capacity_names_only_known_values() -> None:
    assert describe_capacity(CAPACITY) == "3.0 GiB free on cpu"
    known = Capacity("cuda", 2**30, 2, 1e12, uplink=5e6, downlink=1e7, round_trip=0.0215)
    assert describe_capacity(known) == (
        "1.0 GiB free on cuda, to the coordinator 40.0 Mb/s up, 80.0 Mb/s down, 21.5 ms there and back, "
        "1,000.0 GFLOP/s in training"
    )
