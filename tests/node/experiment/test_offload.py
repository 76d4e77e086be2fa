"""What a swarm in one process computes depends neither on interruptions nor on how much is in memory."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from node.core.worker.compute import Compute
from node.data.stream import SampleStream, open_stream
from node.experiment.in_process_replica import LocalReplica, plan_of
from node.experiment.in_process_swarm import LocalSwarm, RoundReport
from node.experiment.offload import ReplicaOffload, large_tensors
from node.experiment.variation import Variation
from protocol.errors import ErrorCode, HetnodeError
from protocol.spec.run import RunSpec
from tests.support.local_swarms import anchors
from tests.support.running_replica import spec_of

ROUNDS = 3
VARIATIONS = [
    Variation(adaptation=False),
    Variation(row_wise_moments=True),
    Variation(grassmann_every=1),
    Variation(weight_projection=True),
    Variation(full_weight=2.0),
]


pytestmark = pytest.mark.usefixtures("one_thread")


def mixed(**overrides: Any) -> RunSpec:
    """Two full replicas and a pipeline of four members."""
    small = {"swarm.replicas": 2, "inner.steps": 2, "inner.microbatches": 1, "inner.microbatch_size": 1}
    return spec_of(**{**small, "rounds": ROUNDS, "data.validation_batches": 1, **overrides})


def couple(**overrides: Any) -> RunSpec:
    """One full replica and the pipeline; dense payloads, which are decoded faster."""
    return mixed(**{"swarm.replicas": 1, "inner.steps": 1, "outer.top_k": 0, **overrides})


def coarse() -> RunSpec:
    """A couple as every variation allows it: tables and few bits on links, steps of two microbatches."""
    return couple(**{"link.dtype": "dither5", "inner.microbatches": 2, "link.table": True})


@pytest.fixture(scope="module")
def stream() -> SampleStream:
    return open_stream(mixed())


def bits(swarm: LocalSwarm) -> list[list[torch.Tensor]]:
    """All that the replicas have for themselves: parameters, error feedback, moments, also of links."""
    found = []
    for replica in swarm.replicas:
        tensors: list[torch.Tensor] = []
        for state in replica.private_states().values():
            tensors += [*state.error.values(), *state.local.values()]
            if state.moments is not None:
                tensors += [*state.moments["exp_avg"].values(), *state.moments["exp_avg_sq"].values()]
        found.append([tensor.clone() for tensor in tensors])
    return found


def same_bits(one: LocalSwarm, other: LocalSwarm) -> bool:
    pairs = [
        pair
        for mine, theirs in zip(bits(one), bits(other), strict=True)
        for pair in zip(mine, theirs, strict=True)
    ]
    return anchors(one) == anchors(other) and all(torch.equal(*pair) for pair in pairs)


def train(swarm: LocalSwarm, rounds: int) -> list[tuple[RoundReport, list[float]]]:
    return [(swarm.train_round(), swarm.validate()) for _ in range(rounds)]


# Saved and restored


@pytest.fixture(scope="module", params=[{}, {"outer.overlap": 1}], ids=["", "overlap"])
def uninterrupted(
    request: pytest.FixtureRequest, stream: SampleStream
) -> tuple[LocalSwarm, list[tuple[RoundReport, list[float]]]]:
    """A swarm with all in memory that has come to its end, and what it said meanwhile."""
    swarm = LocalSwarm(mixed(**request.param), stream=stream)
    return swarm, train(swarm, ROUNDS)


@pytest.fixture(scope="module")
def interrupted(
    tmp_path_factory: pytest.TempPathFactory,
    stream: SampleStream,
    uninterrupted: tuple[LocalSwarm, list[tuple[RoundReport, list[float]]]],
) -> Path:
    """The folders in which another swarm was saved, by the round after which that was."""
    folder = tmp_path_factory.mktemp("interrupted")
    swarm = LocalSwarm(uninterrupted[0].spec, stream=stream)
    for at in range(ROUNDS + 1):
        swarm.save(folder / str(at))
        if at < ROUNDS:
            train(swarm, 1)
    return folder


@pytest.mark.parametrize("at", [0, pytest.param(1, marks=pytest.mark.slow), 2, ROUNDS])
def test_a_swarm_that_was_interrupted_goes_on_with_the_same_bits(
    stream: SampleStream,
    uninterrupted: tuple[LocalSwarm, list[tuple[RoundReport, list[float]]]],
    interrupted: Path,
    at: int,
) -> None:
    usual, expected = uninterrupted
    resumed = LocalSwarm(usual.spec, stream=stream)
    assert resumed.restore(interrupted / str(at))
    assert resumed.position == at
    assert train(resumed, ROUNDS - at) == expected[at:]
    assert same_bits(resumed, usual)
    assert [r.bytes_sent for r in resumed.replicas] == [r.bytes_sent for r in usual.replicas]


@pytest.mark.parametrize("variation", VARIATIONS, ids=lambda each: ",".join(each.changes) or "none")
def test_what_a_variation_has_learned_is_kept(
    tmp_path: Path, stream: SampleStream, variation: Variation
) -> None:
    usual, resumed = (LocalSwarm(coarse(), stream=stream, variation=variation) for _ in range(2))
    train(usual, 1)
    usual.save(tmp_path)
    assert resumed.restore(tmp_path)
    assert train(resumed, 2) == train(usual, 2)
    assert same_bits(resumed, usual)


def test_a_later_state_takes_the_place_of_an_earlier_one(tmp_path: Path, stream: SampleStream) -> None:
    swarm = LocalSwarm(couple(), stream=stream)
    for _ in range(2):
        swarm.train_round()
        swarm.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["round-000002"]


def test_nothing_is_restored_where_nothing_was_saved_or_it_is_of_something_else(
    tmp_path: Path, stream: SampleStream
) -> None:
    spec = couple()
    swarm = LocalSwarm(spec, stream=stream)
    assert not swarm.restore(tmp_path / "nothing")
    swarm.train_round()
    swarm.save(tmp_path)
    others = [
        LocalSwarm(couple(**{"inner.steps": 2}), stream=stream),
        LocalSwarm(spec, stream=stream, variation=Variation(full_weight=2)),
    ]
    for other in others:
        before = anchors(other)
        assert not other.restore(tmp_path)
        assert other.position == 0
        assert anchors(other) == before


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_a_state_that_was_damaged_anywhere_is_refused_whole(
    saved: tuple[LocalSwarm, Path], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    fresh, source = saved
    folder = tmp_path_factory.mktemp("damaged") / "swarm"
    shutil.copytree(source, folder)
    victim = data.draw(st.sampled_from(sorted(path for path in folder.rglob("*") if path.is_file())))
    content = bytearray(victim.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    victim.write_bytes(content)
    assert not fresh.restore(folder)
    assert fresh.position == 0


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, stream: SampleStream) -> tuple[LocalSwarm, Path]:
    """A swarm before its first round, and the place where one like it was saved after a round."""
    folder = tmp_path_factory.mktemp("saved")
    swarm = LocalSwarm(couple(), stream=stream, variation=Variation(grassmann_every=3))
    swarm.train_round()
    swarm.save(folder)
    return LocalSwarm(couple(), stream=stream, variation=Variation(grassmann_every=3)), folder


def test_a_file_that_is_missing_is_as_bad_as_a_damaged_one(
    saved: tuple[LocalSwarm, Path], tmp_path: Path
) -> None:
    fresh, source = saved
    files = [path.relative_to(source) for path in source.rglob("*") if path.is_file()]
    for number, file in enumerate(files):
        folder = tmp_path / str(number)
        shutil.copytree(source, folder)
        (folder / file).unlink()
        assert not fresh.restore(folder), file


def test_a_saved_swarm_names_no_place_of_this_machine(saved: tuple[LocalSwarm, Path]) -> None:
    _, folder = saved
    files = [path.read_bytes() for path in folder.glob("round-*/*")]
    assert len(files) == 4
    assert not any(str(folder).encode() in each for each in files)


# Parked


@pytest.mark.parametrize("resident", [1, 2])
def test_bits_do_not_depend_on_how_many_replicas_are_in_memory(
    stream: SampleStream,
    uninterrupted: tuple[LocalSwarm, list[tuple[RoundReport, list[float]]]],
    resident: int,
) -> None:
    usual, expected = uninterrupted
    bounded = LocalSwarm(usual.spec, stream=stream, resident=resident)
    assert train(bounded, ROUNDS) == expected
    assert same_bits(bounded, usual)


@pytest.mark.parametrize("variation", VARIATIONS, ids=lambda each: ",".join(each.changes) or "none")
def test_variations_steer_replicas_that_are_parked(stream: SampleStream, variation: Variation) -> None:
    usual = LocalSwarm(coarse(), stream=stream, variation=variation)
    bounded = LocalSwarm(coarse(), stream=stream, variation=variation, resident=1)
    assert train(bounded, 2) == train(usual, 2)
    assert same_bits(bounded, usual)


@pytest.mark.parametrize("victim", [0, 2])
def test_a_parked_replica_with_nothing_to_give_or_that_is_screened_out_goes_on_as_a_ready_one(
    stream: SampleStream, victim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Round 1: the victim has left the finite numbers. Round 2: its payloads are refused."""
    spec = mixed()
    usual, bounded = LocalSwarm(spec, stream=stream), LocalSwarm(spec, stream=stream, resident=1)
    for swarm in (usual, bounded):
        with torch.no_grad():
            first = swarm.replicas[victim].host_of(1).modules[1].canonical_parameters()["1.wq"]
            first[0, 0] = float("nan")
    reports = [swarm.train_round() for swarm in (usual, bounded)]
    assert reports[0].contributions == reports[1].contributions
    assert min(reports[0].contributions) == 2
    assert same_bits(bounded, usual)

    def refuse(payloads: Sequence[bytes]) -> list[str]:
        return ["refused" if position == victim else "" for position in range(len(payloads))]

    for swarm in (usual, bounded):
        for stage in (0, 1):
            monkeypatch.setattr(swarm.replicas[2].host_of(stage).outer[stage], "screen", refuse)
    second = [swarm.train_round() for swarm in (usual, bounded)]
    assert second[0] == second[1]
    assert second[0].contributions == (2, 2, 3, 3)
    assert same_bits(bounded, usual)


def test_a_round_that_is_aborted_leaves_parked_replicas_as_ready_ones(
    stream: SampleStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, bounded = (LocalSwarm(couple(), stream=stream, resident=n) for n in (0, 1))
    for swarm in (usual, bounded):
        first = swarm.replicas[1].host_of(0).outer[0]
        monkeypatch.setattr(first, "screen", lambda payloads: ["refused"] * len(payloads))
        assert swarm.train_round().contributions == (0, 2, 2, 2)
        monkeypatch.undo()
        swarm.train_round()
    assert same_bits(bounded, usual)


def test_a_swarm_that_is_parked_is_saved_and_restored_as_any(tmp_path: Path, stream: SampleStream) -> None:
    bounded, resumed = (LocalSwarm(couple(), stream=stream, resident=n) for n in (1, 2))
    train(bounded, 1)
    bounded.save(tmp_path)
    assert resumed.restore(tmp_path)
    assert train(resumed, 1) == train(bounded, 1)
    assert same_bits(resumed, bounded)


def test_replicas_that_average_gradients_must_all_be_there(stream: SampleStream) -> None:
    variation = Variation(average_gradients=True)
    with pytest.raises(HetnodeError) as refused:
        LocalSwarm(mixed(), stream=stream, variation=variation, resident=1)
    assert refused.value.code is ErrorCode.BAD_OPTION


def held(replica: LocalReplica) -> int:
    """Bytes of what it has for itself."""
    return sum(tensor.nbytes for _, tensor in large_tensors(replica))


def test_a_parked_replica_holds_nothing_and_all_hold_one_anchor(stream: SampleStream) -> None:
    swarm = LocalSwarm(couple(), stream=stream, resident=1)
    swarm.train_round()
    swarm.validate()
    replicas = swarm.replicas.built
    assert [held(replicas[index]) > 0 for index in range(2)] == [False, True]
    places = {replica.host_of(0).outer[0].anchor["emb"].data_ptr() for replica in replicas.values()}
    places |= {replicas[1].members[position].outer.embedding.data_ptr() for position in range(4)}
    assert len(places) == 1


@settings(max_examples=25, deadline=None)
@given(
    assignments=st.integers(1, 4),
    uses=st.lists(st.one_of(st.integers(0, 3), st.none()), max_size=12),
)
def test_what_is_done_to_all_is_done_to_each_in_order_before_it_is_used(
    assignments: int, uses: list[int | None]
) -> None:
    spec = mixed(**{"swarm.replicas": 4, "swarm.pipelines": 0, "model.layers": 4})
    done: dict[int, list[int]] = {index: [] for index in range(4)}
    built: list[int] = []

    def build(index: int) -> LocalReplica:
        built.append(index)
        return _Light(index)  # type: ignore[return-value]

    parking = ReplicaOffload(len(plan_of(spec).replicas), build, assignments)
    wanted = 0
    for use in uses:
        if use is None:
            wanted += 1
            parking.each(lambda position, _, number=wanted: done[position].append(number))  # type: ignore[misc]
        else:
            replica = parking[use]
            assert replica.index == use  # type: ignore[attr-defined]
            assert replica.tensors.tolist() == [use]  # type: ignore[attr-defined]
            assert done[use] == list(range(1, wanted + 1))
            ready = [each for each in parking.built.values() if each.tensors.numel()]  # type: ignore[attr-defined]
            assert len(ready) <= assignments
    assert len(set(built)) == len(built)


class _Light:
    """A replica, and its only member, with one tensor and no link."""

    hosted = SimpleNamespace(upstream=None, downstream=None)

    def __init__(self, index: int) -> None:
        self.index, self.tensors, self.members = index, torch.tensor([index]), (self,)

    def abandon(self) -> None:
        pass

    def own_tensors(self) -> dict[str, torch.Tensor]:
        return {"tensors": self.tensors}


def test_how_a_swarm_computes_is_no_part_of_what_it_is(tmp_path: Path, stream: SampleStream) -> None:
    swarm = LocalSwarm(couple(), stream=stream)
    swarm.train_round()
    swarm.save(tmp_path)
    assert LocalSwarm(couple(), Compute(activation_checkpointing=True), stream).restore(tmp_path)
