"""Forecasts of small cases that can be worked out by hand, and properties that hold for all cases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.scaling import scaling
from coordinator.ops.forecast.forecast import Traffic, forecast, proposed, shared_out
from coordinator.placement.cost_model import Survey, message_bytes
from coordinator.placement.rules import links_between
from coordinator.run.state.records import Peer
from protocol.math.flops import microbatch_flops
from protocol.run_files.resolve import resolve
from protocol.spec.run import RunSpec
from protocol.status import Cause, CauseCode
from protocol.types import Capacity, Lifecycle, Member, PeerId, Replica, Role, StageRange

SPEC = resolve("nano", overrides={"inner.steps": 5, "inner.microbatches": 4, "swarm.stages": 2})
WHOLE = StageRange(0, 2)
FLOPS = 1e9
PAYLOADS = (3000, 2000)


def capacity(flops: float = FLOPS, uplink: float = 1e6, downlink: float = 2e6) -> Capacity:
    return Capacity("", 2**40, 1, flops, uplink, downlink, 0.0)


def full(index: int, name: str) -> Replica:
    return Replica(index, (Member(PeerId(name), WHOLE, "here"),), ())


def pipeline(index: int, *names: str, k: int = 8) -> Replica:
    members = tuple(
        Member(PeerId(name), StageRange(stage, stage + 1), "here") for stage, name in enumerate(names)
    )
    return Replica(index, members, links_between(members, k))


def peer(name: str, role: Role, able: Capacity, arrival: int) -> Peer:
    return Peer(PeerId(name), role, able, "here", arrival, Lifecycle.READY)


def test_two_full_replicas_compute_and_exchange_their_payloads() -> None:
    survey = Survey({PeerId("a"): capacity(), PeerId("b"): capacity(2 * FLOPS, uplink=1e3)})
    found = forecast(SPEC, survey, [full(0, "a"), full(1, "b")], PAYLOADS)
    slowest = 4 * microbatch_flops(SPEC, WHOLE) / FLOPS
    assert found.inner_seconds == pytest.approx(5 * slowest)
    assert found.gather_seconds == pytest.approx(5000 / 1e3)  # b's uplink carries one payload of each stage
    assert found.embedding_seconds == 0
    assert found.per_round == {"a": Traffic(5000, 5000), "b": Traffic(5000, 5000)}
    assert found.tokens_per_round == 2 * 5 * 4 * SPEC.inner.microbatch_size * SPEC.model.context
    assert found.replicas[0].step.utilization == pytest.approx((1.0,))
    assert found.replicas[0].utilization[0] == pytest.approx(found.inner_seconds / found.round_seconds)
    assert found.tokens_per_second == pytest.approx(found.tokens_per_round / found.round_seconds)


def test_overlapping_steps_hide_the_exchange_for_as_long_as_they_last() -> None:
    survey = Survey({PeerId("a"): capacity(), PeerId("b"): capacity(uplink=1e3)})
    replicas = [full(0, "a"), full(1, "b")]
    plain = forecast(SPEC, survey, replicas, PAYLOADS)
    step = plain.inner_seconds / SPEC.inner.steps
    overlapping = SPEC.model_copy(update={"outer": SPEC.outer.model_copy(update={"overlap": 2})})
    found = forecast(overlapping, survey, replicas, PAYLOADS)
    assert found.hidden_seconds == pytest.approx(min(2 * step, plain.outer_seconds))
    assert found.round_seconds == pytest.approx(plain.round_seconds - found.hidden_seconds)
    assert found.tokens_per_second > plain.tokens_per_second
    fast = Survey({PeerId("a"): capacity(uplink=1e9, downlink=1e9), PeerId("b"): capacity(1.0, 1e9, 1e9)})
    hidden = forecast(overlapping, fast, replicas, PAYLOADS)
    assert hidden.round_seconds == pytest.approx(hidden.inner_seconds)


@pytest.mark.parametrize(
    ("pair", "mean", "all_stages"),
    [
        # A full replica sends the payloads of one stage in a round, and of both in the last.
        ([full(0, "a"), full(1, "b")], (3000 + 2000) / 2 / 1e3, 5000 / 1e3),
        # A host of one stage sends its whole payload in its turn.
        ([pipeline(0, "a", "c"), pipeline(1, "b", "d")], (3000 + 2000) / 2 / 1e3, 3000 / 1e3),
    ],
    ids=["full", "pipelines"],
)
def test_stages_in_turn_are_gathered_in_the_mean_time_of_their_rounds(
    pair: list[Replica], mean: float, all_stages: float
) -> None:
    survey = Survey({PeerId(name): capacity(uplink=1e3, downlink=1e6) for name in "abcd"})
    in_turn = SPEC.model_copy(update={"outer": SPEC.outer.model_copy(update={"turns": 2})})
    found = forecast(in_turn, survey, pair, PAYLOADS)
    assert found.gather_seconds == pytest.approx(mean)
    assert found.all_stages_seconds == pytest.approx(all_stages)
    usual = forecast(SPEC, survey, pair, PAYLOADS)
    assert usual.gather_seconds == usual.all_stages_seconds == pytest.approx(all_stages)


def test_an_overlap_hides_at_most_the_exchange_of_each_turn() -> None:
    outer = SPEC.outer.model_copy(update={"turns": 2, "overlap": 2})
    in_turn = SPEC.model_copy(update={"outer": outer})
    most = 2 * 4 * microbatch_flops(SPEC, WHOLE) / FLOPS
    # The exchanges of the two turns take 1.2 and 0.8 of the steps that overlap.
    survey = Survey({PeerId(name): capacity(uplink=2500 / most, downlink=1e9) for name in "ab"})
    found = forecast(in_turn, survey, [full(0, "a"), full(1, "b")], PAYLOADS)
    assert found.gather_seconds == pytest.approx(most)
    assert found.hidden_seconds == pytest.approx((1.0 + 0.8) / 2 * most)


def test_the_embedding_is_fetched_in_the_turn_of_stage_0_alone() -> None:
    replicas = [full(0, "whole"), pipeline(1, "upper", "lower")]
    survey = Survey({PeerId(name): capacity() for name in ("whole", "upper", "lower")})
    usual = forecast(SPEC, survey, replicas, PAYLOADS)
    in_turn = SPEC.model_copy(update={"outer": SPEC.outer.model_copy(update={"turns": 2})})
    assert forecast(in_turn, survey, replicas, PAYLOADS).embedding_seconds == pytest.approx(
        usual.embedding_seconds / 2
    )


def test_a_pipeline_sends_every_microbatch_and_fetches_the_embedding() -> None:
    replicas = [full(0, "whole"), pipeline(1, "upper", "lower")]
    survey = Survey({PeerId(name): capacity() for name in ("whole", "upper", "lower")})
    found = forecast(SPEC, survey, replicas, PAYLOADS)
    down, up = message_bytes(SPEC, 8)
    messages = 5 * 4
    # Besides the links: one other replica; and "lower" fetches both payloads of stage 0, one from each host.
    assert found.per_round["upper"] == Traffic(messages * down + 3000 + 3000, messages * up + 3000)
    assert found.per_round["lower"] == Traffic(messages * up + 2000, messages * down + 2000 + 2 * 3000)
    assert found.per_round["whole"] == Traffic(5000 + 3000, 5000)
    assert found.gather_seconds == pytest.approx(5000 / 1e6)
    assert found.embedding_seconds == pytest.approx(6000 / 2e6)
    per_day = found.per_day["lower"]
    assert per_day.sent == pytest.approx((messages * up + 2000) * 86_400 / found.round_seconds)


def test_snapshots_of_the_embedding_are_fetched_during_the_inner_phase() -> None:
    replicas = [full(0, "whole"), pipeline(1, "upper", "lower")]
    survey = Survey({PeerId(name): capacity() for name in ("whole", "upper", "lower")})
    usual = forecast(SPEC, survey, replicas, PAYLOADS)
    every_fifth = SPEC.model_copy(update={"link": SPEC.link.model_copy(update={"embedding_every": 5})})
    found = forecast(every_fifth, survey, replicas, PAYLOADS)
    table = 2 * SPEC.model.vocabulary * SPEC.model.width
    down, up = message_bytes(SPEC, 8)
    messages = 5 * 4
    lower = found.per_round["lower"]
    assert lower.received == pytest.approx(messages * down + 2000 + table / 5)
    assert lower.sent == pytest.approx(messages * up + 2000 + table / 3 / 5)
    assert found.per_round["whole"].sent == pytest.approx(5000 + table / 3 / 5)
    assert found.embedding_seconds == 0
    assert found.gather_seconds == usual.gather_seconds
    large = resolve(
        "nano", overrides={"swarm.stages": 2, "model.vocabulary": 2**20, "link.embedding_every": 5}
    )
    table = 2 * large.model.vocabulary * large.model.width
    waiting = forecast(large, survey, replicas, PAYLOADS)
    instant = Survey({PeerId(name): capacity(1e30) for name in ("whole", "upper", "lower")})
    quick = forecast(large, instant, replicas, PAYLOADS)
    assert quick.inner_seconds < table / 2e6
    assert quick.embedding_seconds == pytest.approx((table / 2e6 - quick.inner_seconds) / 5)
    assert waiting.embedding_seconds == pytest.approx(max(0.0, table / 2e6 - waiting.inner_seconds) / 5)
    alone = forecast(every_fifth, survey, [full(0, "whole")], PAYLOADS)
    assert alone.embedding_seconds == 0


def test_snapshots_of_the_embedding_let_large_swarms_scale_better() -> None:
    shape = {"swarm.stages": 4, "model.layers": 4, "inner.microbatches": 8}
    usual, varied = (
        list(scaling(spec, [10_000] * 4, capacity(), capacity(4 * FLOPS), 0.8, (20, 80)))
        for spec in (resolve("nano", overrides={**shape, "link.embedding_every": every}) for every in (0, 10))
    )
    assert all(new.efficiency >= old.efficiency for old, new in zip(usual, varied, strict=True))
    assert varied[1].efficiency > usual[1].efficiency


def test_the_bottleneck_is_a_sentence() -> None:
    quick = Survey({PeerId(name): capacity(1e15, uplink=100.0) for name in ("upper", "lower", "whole")})
    replicas = [full(0, "whole"), pipeline(1, "upper", "lower")]
    assert "uplink of" in forecast(SPEC, quick, replicas, PAYLOADS).bottleneck
    outer = forecast(SPEC, quick, [full(0, "whole"), full(1, "upper")], PAYLOADS).bottleneck
    assert outer.startswith("the outer exchange, 100% of a round: uplink of ")
    slow = Survey({PeerId(name): capacity(1e3, uplink=1e9) for name in ("upper", "lower", "whole")})
    assert (
        "computing of ..whole, in replica-0" in forecast(SPEC, slow, [full(0, "whole")], PAYLOADS).bottleneck
    )


def test_without_measurements_nothing_takes_time() -> None:
    found = forecast(SPEC, Survey(), [full(0, "a"), pipeline(1, "b", "c")], PAYLOADS)
    assert (found.round_seconds, found.tokens_per_second, found.utilization) == (0, 0, 0)
    assert found.bottleneck == "nothing is known of the peers' speeds"
    assert all(each == Traffic() for each in found.per_day.values())


def test_faster_replicas_take_more_of_the_microbatches() -> None:
    survey = Survey({PeerId("slow"): capacity(), PeerId("fast"): capacity(3 * FLOPS)})
    shared = shared_out(SPEC, survey, [full(0, "slow"), full(1, "fast")])
    assert [each.microbatches for each in shared] == [2, 6]
    assert [each.weight for each in shared] == [0.5, 1.5]
    evenly = forecast(SPEC, survey, [full(0, "slow"), full(1, "fast")], PAYLOADS)
    assert forecast(SPEC, survey, shared, PAYLOADS).tokens_per_second > 1.5 * evenly.tokens_per_second
    unknown = shared_out(SPEC, Survey(), [full(0, "slow"), full(1, "fast")])
    assert [*map(SPEC.microbatches_of, unknown)] == [4, 4]


def test_the_proposed_plan_has_all_replicas_and_leaves_spares() -> None:
    spec = resolve("nano", overrides={"swarm.stages": 2, "swarm.replicas": 1, "swarm.pipelines": 1})
    peers = [peer("whole", Role.REPLICA, capacity(), 1)]
    peers += [
        peer(name, Role.STAGE, capacity(flops), n)
        for n, (name, flops) in enumerate((("weak", FLOPS / 10), ("one", FLOPS), ("two", FLOPS)), 2)
    ]
    found = proposed(spec, peers)
    assert not isinstance(found, Cause)
    assert [len(each.members) for each in found.replicas] == [1, 2]
    assert {member.peer for member in found.replicas[1].members} == {"one", "two"}
    assert found.spares == ("weak",)
    assert isinstance(proposed(spec, peers[:2]), Cause)


def test_too_little_memory_is_the_reason_to_wait() -> None:
    spec = resolve("nano", overrides={"swarm.stages": 2, "swarm.replicas": 0, "swarm.pipelines": 1})
    small = [peer(f"p{n}", Role.STAGE, replace(capacity(), memory_bytes=1000), n) for n in (1, 2)]
    found = proposed(spec, small)
    assert isinstance(found, Cause)
    assert found.code is CauseCode.MEMORY_LACKING


def utilization(
    spec: RunSpec, nbytes: Sequence[int], able: Capacity, pipelines: int, k: int, bandwidth: float
) -> float:
    """Of pipelines whose members have lines of `bandwidth` bits per second."""
    here = replace(able, uplink=bandwidth / 8, downlink=bandwidth / 8)
    stages = range(spec.swarm.stages)
    replicas = [pipeline(index, *(f"{index}-{stage}" for stage in stages), k=k) for index in range(pipelines)]
    survey = Survey({member.peer: here for each in replicas for member in each.members})
    return forecast(spec, survey, replicas, nbytes).utilization


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3), st.floats(0, 0.1), st.floats(1e9, 1e14))
def test_more_bandwidth_or_a_narrower_link_never_lowers_utilization(
    pipelines: int, round_trip: float, flops: float
) -> None:
    able = replace(capacity(flops), round_trip=round_trip)
    # A bandwidth of 0 is unknown, so it takes no time: what is left is the fill and drain of the pipeline.
    bound = utilization(SPEC, PAYLOADS, replace(able, round_trip=0.0), pipelines, 32, 0.0)
    by_k = [
        [utilization(SPEC, PAYLOADS, able, pipelines, k, each) for each in (1e5, 1e6, 1e7, 1e9)]
        for k in (32, 8, 1)
    ]
    for shares in by_k:
        assert shares == sorted(shares)
        assert all(0 < each <= bound + 1e-12 for each in shares)
    for wide, narrow in pairwise(by_k):
        assert all(one <= other + 1e-12 for one, other in zip(wide, narrow, strict=True))


def test_a_swarm_whose_exchange_costs_nothing_scales_in_proportion() -> None:
    """Weak scaling. With payloads that take time it does not, since all payloads go to all replicas."""
    spec = resolve("nano", overrides={"swarm.stages": 4, "model.layers": 4, "inner.microbatches": 8})
    free, costly = (
        list(scaling(spec, [nbytes] * 4, capacity(), capacity(4 * FLOPS), 0.8, (20, 40, 80)))
        for nbytes in (0, 10_000)
    )
    assert [each.efficiency for each in free if each.kind == "weak"] == pytest.approx([1, 1, 1])
    weak = [each.efficiency for each in costly if each.kind == "weak"]
    assert weak[0] == 1 > weak[1] > weak[2]
    strong = [each for each in costly if each.kind == "strong"]
    assert [(each.replicas, each.pipelines) for each in strong] == [(4, 4), (8, 8), (16, 16)]
    assert {each.microbatches for each in strong} == {64}


@pytest.mark.parametrize(("k", "bandwidth"), [(1024, 1000e6), (82, 100e6)])
def test_the_70b_preset_keeps_its_members_busy_at_the_papers_bandwidths(k: int, bandwidth: float) -> None:
    """Over 97 % in two pipelines of members of 40 TFLOP/s, 20 ms apart: the paper's figure 2."""
    spec = resolve("70b", overrides={"inner.microbatches": 256, "inner.steps": 50})
    member = Capacity("", 2**40, 1, 40e12, 0, 0, 0.04)
    assert utilization(spec, [175_000_000] * 4, member, 2, k, bandwidth) > 0.97


def test_the_70b_preset_has_the_size_of_its_name() -> None:
    spec: RunSpec = resolve("70b")
    assert (spec.model.width, spec.model.layers, spec.swarm.stages) == (8192, 80, 4)
    assert spec.parameters == pytest.approx(70e9, rel=0.02)
