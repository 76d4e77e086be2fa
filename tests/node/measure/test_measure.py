"""What a node measures of itself and of the ways to others, without disturbing anybody for long."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from node.ipc.worker_calls import CheckDevice, ComputeOptions, MeasureSpeed
from node.measure import measure
from node.measure.measure import (
    MOST_NEIGHBOURS,
    LinkProber,
    candidates,
    describe_capacity,
    known_speed,
    measure_speed,
    tokens_per_second,
    training_speed,
)
from node.model.init import parameter_count
from node.net.live_estimates import LiveEstimates
from node.net.membership import RunView
from node.net.probe import Figures
from node.worker import speed
from node.worker.worker import Worker
from protocol.algorithm.flops import layer_flops, microbatch_flops, tokens_of_microbatch
from protocol.errors import ErrorCode, HetnodeError
from protocol.spec.resolve import resolve
from protocol.types import (
    Capacity,
    LinkEstimate,
    Member,
    PeerId,
    Plan,
    Replica,
    ReservedAssignment,
    StageRange,
)
from tests.virtual.loop import run as run_virtually

SPEC = resolve("nano")
CAPACITY = Capacity("cpu", 3 * 2**30, 2)
ME = PeerId("me")
REFUSED = HetnodeError(ErrorCode.RATE_LIMITED, "Not now.", "Later.")


class FakeWorker:
    """Computes at 5 GFLOP/s, or raises."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.calls = error, 0

    async def call(self, request: MeasureSpeed) -> float:
        assert request.spec.preset in ("nano", "tiny")
        self.calls += 1
        if self.error:
            raise self.error
        return 5e9


# Operations


@pytest.mark.parametrize("preset", ["nano", "tiny", "178m", "1b"])
def test_operations_are_those_of_the_matrices_and_of_attention(preset: str) -> None:
    spec = resolve(preset)
    model, stages = spec.model, range(spec.swarm.stages)
    vectors = (2 * model.layers + 1) * model.width
    embedding = model.vocabulary * model.width
    matrices = sum(parameter_count(spec, stage) for stage in stages) - vectors - embedding
    attention = 12 * model.layers * model.context * model.width
    assert microbatch_flops(spec, stages) == (6 * matrices + attention) * tokens_of_microbatch(spec)
    assert sum(microbatch_flops(spec, (stage,)) for stage in stages) == microbatch_flops(spec, stages)
    assert layer_flops(spec, model.layers) < microbatch_flops(spec, stages)


def test_tokens_per_second_of_a_stage_follow_from_its_operations() -> None:
    seconds = microbatch_flops(SPEC, (0,)) / 1e9
    assert tokens_per_second(SPEC, 0, 1e9) == pytest.approx(tokens_of_microbatch(SPEC) / seconds)


# Computing


def test_the_worker_measures_the_layers_of_a_run_before_it_builds_any() -> None:
    worker = Worker()
    assert worker.check_device(CheckDevice(ComputeOptions("cpu"))) == 0
    assert 0 < worker.measure_speed(MeasureSpeed(SPEC, "cpu", seconds=0.01)) < 1e15


def test_a_device_that_cannot_compute_is_said_to_be_so() -> None:
    with pytest.raises(HetnodeError) as refused:
        Worker().measure_speed(MeasureSpeed(SPEC, "nonsense", seconds=0.01))
    assert refused.value.code is ErrorCode.DEVICE_UNAVAILABLE


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("short of memory\nand more")])
def test_a_device_whose_memory_is_too_short_is_said_to_be_so(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object) -> float:
        raise error

    monkeypatch.setattr(speed, "_measured", fail)
    with pytest.raises(HetnodeError) as refused:
        speed.layer_speed(SPEC, "cpu", 0.01)
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


@pytest.mark.parametrize(
    "damaged", [b"", b"\xff", b"[]", b"3", b'{"a": "b"}', b'{"a": NaN}', b'{"a": -1}', b'{"a": []}']
)
async def test_a_damaged_file_of_speeds_is_made_anew(tmp_path: Path, damaged: bytes) -> None:
    worker: Any = FakeWorker()
    (tmp_path / "speed.json").write_bytes(damaged)
    for _ in range(2):
        assert await training_speed(worker, SPEC, "cpu", 2, tmp_path) == 5e9
    assert worker.calls == 1


async def test_a_speed_that_was_measured_before_is_known_by_the_name_of_the_run(tmp_path: Path) -> None:
    worker: Any = FakeWorker()
    assert known_speed(tmp_path, SPEC.run_id, "cpu", 2) == 0.0
    await training_speed(worker, SPEC, "cpu", 2, tmp_path)
    assert known_speed(tmp_path, SPEC.run_id, "cpu", 2) == 5e9
    estimates = LiveEstimates(replace(CAPACITY, flops=3e9))
    await measure_speed(worker, SPEC, "cpu", 2, tmp_path, estimates)
    assert estimates.capacity.flops == 3e9, "what is known already, perhaps from training, stays"


async def test_a_few_speeds_are_kept(tmp_path: Path) -> None:
    worker: Any = FakeWorker()
    for threads in range(100):
        await training_speed(worker, SPEC, "cpu", threads, tmp_path)
    assert len(json.loads((tmp_path / "speed.json").read_text())) == 32
    assert [path.name for path in tmp_path.iterdir()] == ["speed.json"]


async def test_a_folder_that_takes_nothing_costs_only_the_next_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    worker: Any = FakeWorker()
    assert await training_speed(worker, SPEC, "cpu", 2, tmp_path / "file") == 5e9


async def test_a_machine_that_cannot_be_measured_takes_part_all_the_same(tmp_path: Path) -> None:
    estimates = LiveEstimates(CAPACITY)
    for error in (
        HetnodeError(ErrorCode.DEVICE_UNAVAILABLE, "No memory.", "Free some."),
        RuntimeError("worker: IndexError()"),  # what a bug over there looks like here
    ):
        worker: Any = FakeWorker(error)
        await measure_speed(worker, SPEC, "cpu", 2, tmp_path, estimates)
        assert estimates.capacity == CAPACITY
    dead: Any = FakeWorker(HetnodeError(ErrorCode.WORKER_DIED, "Dead.", ""))
    with pytest.raises(HetnodeError):
        await measure_speed(dead, SPEC, "cpu", 2, tmp_path, estimates)


async def test_what_was_measured_is_news_for_the_coordinator(tmp_path: Path) -> None:
    estimates = LiveEstimates(CAPACITY)
    worker: Any = FakeWorker()
    await measure_speed(worker, SPEC, "cpu", 2, tmp_path, estimates)
    news = estimates.due(0.0)
    assert news is not None
    assert news.capacity.flops == 5e9
    assert "5.0 GFLOP/s" in describe_capacity(estimates.capacity)


def test_words_say_what_is_known_and_nothing_else() -> None:
    assert describe_capacity(CAPACITY) == "3.0 GiB free on cpu"
    known = Capacity("cuda", 2**30, 2, 1e12, uplink=5e6, downlink=1e7, round_trip=0.0215)
    assert describe_capacity(known) == (
        "1.0 GiB free on cuda, to the coordinator 40.0 Mb/s up, 80.0 Mb/s down, 21.5 ms there and back, "
        "1,000.0 GFLOP/s in training"
    )


# Who is measured


def placed(**stages: int) -> RunView:
    """Peers with one stage each."""
    followers = {
        PeerId(peer): ReservedAssignment(PeerId(peer), 0, stage, StageRange(stage, stage + 1))
        for peer, stage in stages.items()
    }
    return RunView(followers=followers)


ENDPOINTS = {name: f"{name}:1" for name in ("me", "a", "b", "c", "d", "e", "f")}


def test_those_next_to_this_nodes_place_are_measured_first() -> None:
    run_view = placed(me=2, a=0, b=1, c=2, d=3, e=0)
    found = candidates(run_view, ENDPOINTS, ME)
    assert len(found) == MOST_NEIGHBOURS
    assert {peer for peer, _ in found[:2]} == {"b", "d"}
    assert all(endpoint == f"{peer}:1" for peer, endpoint in found)


def test_a_node_measures_neither_itself_nor_the_banned_nor_whoever_only_dials() -> None:
    run_view = RunView(banned=frozenset({PeerId("a")}))
    found = {peer for peer, _ in candidates(run_view, {"me": "me:1", "a": "a:1", "b": "b:1"}, ME)}
    assert found == {"b"}


def test_not_all_measure_the_same_ones() -> None:
    endpoints = {f"peer-{number}": "h:1" for number in range(50)}
    chosen = {
        tuple(peer for peer, _ in candidates(RunView(), endpoints, PeerId(f"peer-{number}")))
        for number in range(10)
    }
    assert len(chosen) == 10


# While it takes part


class FakeProbe:
    def __init__(self, figures: Figures) -> None:
        self._figures = figures

    async def figures(self, seconds: float = 2.0) -> Figures:
        await asyncio.sleep(2 * seconds)
        return self._figures

    async def round_trip(self) -> float:
        await asyncio.sleep(self._figures.round_trip)
        return self._figures.round_trip


class Around:
    """Everything that a node's surroundings are, on a virtual clock."""

    def __init__(self, capacity: Capacity = CAPACITY) -> None:
        self.estimates = LiveEstimates(capacity)
        self.run_view = RunView()
        self.known: dict[str, str] = {}
        self.figures = Figures(0.01, 1e6, 2e6)
        self.refused: set[str] = set()
        self.opened: list[str] = []
        self._open = 0

    async def endpoints(self) -> Mapping[str, str]:
        return dict(self.known)

    @asynccontextmanager
    async def probe(self, endpoint: str = "coordinator", peer: str = "") -> AsyncIterator[FakeProbe]:
        self.opened.append(endpoint)
        self._open += 1
        assert self._open == 1, "two at once disturb each other"
        try:
            if endpoint in self.refused:
                raise REFUSED
            yield FakeProbe(self.figures)
        finally:
            self._open -= 1

    def watch(self, joins_pipelines: bool = True) -> asyncio.Task[Any]:
        here: Any = self
        return asyncio.create_task(LinkProber(ME, here, here, here, self.probe, joins_pipelines).keep())


async def stopped(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_candidate_neighbours_are_measured_once_and_then_echoed() -> None:
    async def main() -> None:
        around = Around(measured_capacity())
        around.known = {f"peer-{number}": f"host-{number}:1" for number in range(9)}
        watching = around.watch()
        await asyncio.sleep(30)
        assert len(around.opened) == len(set(around.opened)) == MOST_NEIGHBOURS
        links = around.estimates.now.links
        assert {(link.round_trip, link.bandwidth, link.incoming) for link in links} == {(0.01, 1e6, 2e6)}
        around.figures = Figures(0.05, 7.0, 7.0)
        await asyncio.sleep(120)
        assert {(link.round_trip, link.bandwidth) for link in around.estimates.now.links} == {(0.05, 1e6)}
        assert around.estimates.capacity.round_trip == 0.05
        await stopped(watching)

    run_virtually(main())


def test_an_echo_does_not_undo_what_was_learned_while_it_was_under_way() -> None:
    async def main() -> None:
        around = Around(measured_capacity())
        around.figures = Figures(500.0, 1.0, 1.0)
        watching = around.watch(joins_pipelines=False)
        await asyncio.sleep(300)
        around.estimates.computed(7e9, 1.0)
        await asyncio.sleep(400)
        assert around.estimates.capacity.round_trip == 500.0
        assert around.estimates.capacity.flops == 7e9
        await stopped(watching)

    run_virtually(main())


def measured_capacity() -> Capacity:
    return Capacity("cpu", 2**30, 2, 1e9, 1e6, 1e6, 0.01)


@pytest.mark.parametrize("is_known", [False, True])
def test_a_node_that_trains_measures_nobody(is_known: bool) -> None:
    async def main() -> None:
        around = Around(measured_capacity() if is_known else CAPACITY)
        around.known = {"a": "a:1", "b": "b:1"}
        member = Member(ME, StageRange(0, 2), "")
        around.run_view = RunView(
            plans={1: Plan(1, 1, 0, (Replica(0, (member,), ()),), "because")}, round_number=1
        )
        watching = around.watch()
        await asyncio.sleep(40)
        assert around.opened == []
        await stopped(watching)

    run_virtually(main())


def test_a_full_replica_has_no_neighbours_to_measure() -> None:
    async def main() -> None:
        around = Around(measured_capacity())
        around.known = {"a": "a:1"}
        watching = around.watch(joins_pipelines=False)
        await asyncio.sleep(40)
        assert around.opened == []
        await stopped(watching)

    run_virtually(main())


def test_who_comes_later_is_measured_then() -> None:
    async def main() -> None:
        around = Around(measured_capacity())
        watching = around.watch()
        await asyncio.sleep(4)
        around.known = {"a": "a:1"}
        await asyncio.sleep(20)
        assert around.estimates.now.links == (LinkEstimate(PeerId("a"), 0.01, 1e6, 2e6),)
        await stopped(watching)

    run_virtually(main())


def test_refusals_leave_things_unknown_and_nothing_broken() -> None:
    async def main() -> None:
        around = Around()
        around.known = {"a": "a:1", "b": "b:1"}
        around.refused = {"coordinator", "a:1"}
        watching = around.watch()
        await asyncio.sleep(300)
        assert around.opened.count("coordinator") >= 3
        assert around.opened.count("a:1") == 1
        around.refused = set()
        assert not around.estimates.capacity.uplink
        assert [link.peer for link in around.estimates.now.links] == ["b"]
        assert not watching.done()
        await stopped(watching)

    run_virtually(main())


def test_a_coordinator_that_was_away_when_this_node_joined_is_measured_later() -> None:
    async def main() -> None:
        around = Around()
        around.refused = {"coordinator"}
        watching = around.watch()
        await asyncio.sleep(1)
        around.refused = set()
        await asyncio.sleep(60)
        assert around.estimates.capacity.uplink == 1e6
        assert around.estimates.capacity.downlink == 2e6
        await stopped(watching)

    run_virtually(main())


async def test_measuring_the_coordinator_never_raises() -> None:
    around: Any = Around()
    around.refused = {"coordinator"}
    await measure.measure_coordinator(around, around.estimates)
    assert around.estimates.capacity == CAPACITY
