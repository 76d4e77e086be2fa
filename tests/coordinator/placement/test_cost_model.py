"""The cost model: how long a step takes, what bounds it, and how much memory it needs."""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coordinator.placement.cost_model import (
    Costs,
    Survey,
    memory_needed,
    message_bytes,
)
from coordinator.placement.predict import predict
from coordinator.placement.schedule import LinkTime, StepTime, step_seconds
from node.core.model.shapes import link_table_shapes
from node.core.model.stage import Stage
from node.core.train.pipeline import Pipeline
from node.ipc.worker_calls import Backward, Forward, SquaredNorm
from node.ipc.worker_client import WorkerClient
from protocol.codec.activation import pack_activation, pack_ids
from protocol.math.flops import microbatch_flops
from protocol.memory.needs import layer_activations
from protocol.run_files.presets import PRESETS
from protocol.run_files.resolve import resolve
from protocol.types import (
    Dialer,
    Estimates,
    Frame,
    FrameId,
    Link,
    LinkEstimate,
    Member,
    PeerId,
    Plan,
    Replica,
    StageRange,
)
from protocol.wire.typed_calls import Call, Reply, name_of
from tests.support.cost_model import MEGABIT, capacity, chain, survey
from tests.support.models import scalars_of
from tests.virtual.loop import run

seconds = st.floats(0, 5, allow_subnormal=False)


@st.composite
def link_times(draw: st.DrawFn) -> LinkTime:
    forward, backward = draw(seconds), draw(seconds)
    shares = draw(st.tuples(st.floats(0, 1), st.floats(0, 1)))
    return LinkTime(forward, backward, draw(seconds), forward * shares[0], backward * shares[1])


@st.composite
def chains(draw: st.DrawFn) -> tuple[list[float], list[LinkTime], int]:
    members = draw(st.integers(1, 5))
    links = draw(st.lists(link_times(), min_size=members - 1, max_size=members - 1))
    return draw(st.lists(seconds, min_size=members, max_size=members)), links, draw(st.integers(1, 9))


def test_steps_of_short_chains_equal_times_worked_out_by_hand() -> None:
    assert StepTime((3.0,), (), 4).seconds == pytest.approx(12)
    # The first forward (1), then the other member's microbatches (4 x 3), then the last backward (2).
    assert StepTime(
        (
            3.0,
            3.0,
        ),
        (LinkTime(0, 0, 0),),
        4,
    ).seconds == pytest.approx(15)
    # Nothing overlaps a single microbatch: two forwards, two backwards, a message and a delay each way.
    assert StepTime(
        (
            3.0,
            6.0,
        ),
        (LinkTime(0.5, 0.25, 2),),
        1,
    ).seconds == pytest.approx(13.75)
    # Messages in one direction queue: 1 + 4 x 10 until the last activation is there, then 1 + 2 + 2.
    assert StepTime(
        (
            3.0,
            3.0,
        ),
        (LinkTime(10, 0, 0),),
        4,
    ).seconds == pytest.approx(1 + 40 + 3 + 2)


@pytest.mark.parametrize("seed", range(12))
def test_a_replayed_step_lasts_as_long_as_the_steps_of_the_nodes_pipeline(seed: int) -> None:
    """The production pipeline on a virtual clock, over several steps, norms and phases included."""
    coin = random.Random(seed)
    members, microbatches = coin.randint(1, 5), coin.randint(1, 9)
    compute = [coin.uniform(0.1, 2) for _ in range(members)]
    links = []
    for _ in range(members - 1):
        forward, backward = coin.uniform(0, 1.5), coin.uniform(0, 1.5)
        links.append(LinkTime(forward, backward, coin.uniform(0, 2), forward, backward))
    steps = 3
    took = run(_steps_of_a_pipeline(compute, links, microbatches, steps))
    expected = step_seconds(compute, links, microbatches)
    assert took == pytest.approx([expected] * steps, rel=1e-6)


class _Worker:
    """Computes one call at a time, in the order in which they were made."""

    def __init__(self, seconds: float) -> None:
        self._seconds = {name_of(Forward): seconds / 3, name_of(Backward): seconds * 2 / 3}
        self._free = 0.0

    def call(self, call: Call) -> asyncio.Future[Reply]:
        loop = asyncio.get_running_loop()
        self._free = max(self._free, loop.time()) + self._seconds.get(call.method, 0.0)
        reply: asyncio.Future[Reply] = loop.create_future()
        answer = Reply(b'{"tensors":[],"payload":0}', (b"",))
        if call.method not in self._seconds:
            answer = Reply(b"1.0" if call.method == name_of(SquaredNorm) else b"null")
        loop.call_at(self._free, reply.set_result, answer)
        return reply

    async def wait_closed(self) -> None:
        raise NotImplementedError


class _End:
    """One end of a link: frames pass the member's uplink, then the wire."""

    def __init__(self, uplink: asyncio.Lock, wire_seconds: float, delay: float) -> None:
        self.other: _End
        self._uplink, self._wire = uplink, asyncio.Lock()
        self._wire_seconds, self._delay = wire_seconds, delay
        self._arrived: dict[FrameId, asyncio.Future[Frame]] = {}
        self._sending: set[asyncio.Task[None]] = set()

    async def send(self, frame: Frame, deadline: float) -> None:
        task = asyncio.create_task(self._carry(frame))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def take(self, frame_id: FrameId, deadline: float) -> Frame:
        return await self._expected(frame_id)

    async def _carry(self, frame: Frame) -> None:
        async with self._uplink, self._wire:
            is_scalar = frame.id.kind.value not in ("forward", "backward")
            await asyncio.sleep(0 if is_scalar else self._wire_seconds)
        await asyncio.sleep(self._delay)
        self.other._expected(frame.id).set_result(frame)

    def _expected(self, frame_id: FrameId) -> asyncio.Future[Frame]:
        return self._arrived.setdefault(frame_id, asyncio.get_running_loop().create_future())


async def _steps_of_a_pipeline(
    compute: list[float], links: list[LinkTime], microbatches: int, steps: int
) -> list[float]:
    """Seconds of each inner step, from the first member's view."""
    size = len(compute)
    spec = resolve("nano", overrides={"model.layers": 8, "swarm.stages": max(2, size)})
    members = tuple(Member(PeerId(str(i)), StageRange(i, i + 1), "") for i in range(size))
    replica = Replica(0, members, (Link(8, Dialer.UPSTREAM),) * (size - 1), 1.0, microbatches)
    plan = Plan(1, 1, 0, (replica,), "")
    uplinks = [asyncio.Lock() for _ in compute]
    above = [_End(uplinks[i], link.forward, link.delay) for i, link in enumerate(links)]
    below = [_End(uplinks[i + 1], link.backward, link.delay) for i, link in enumerate(links)]
    for one, other in zip(above, below, strict=True):
        one.other, other.other = other, one
    loop = asyncio.get_running_loop()
    begun: list[float] = []

    async def member(i: int) -> None:
        ends: Any = ([None, *below][i], [*above, None][i])
        worker = WorkerClient(_Worker(compute[i]))
        pipeline = Pipeline(spec, plan, replica, i, worker, *ends)
        for step in range(steps + 1):
            if i == 0:
                begun.append(loop.time())
            if not await pipeline.phase(1, step, wanted=step < steps):
                return
            await pipeline.inner_step(1, step)

    await asyncio.gather(*(member(i) for i in range(size)))
    return [later - earlier for earlier, later in pairwise(begun)]


@given(chains(), st.data())
def test_a_faster_member_or_link_never_makes_a_step_longer(
    case: tuple[list[float], list[LinkTime], int], data: st.DataObject
) -> None:
    compute, links, microbatches = case
    faster = [each * data.draw(st.floats(0, 1)) for each in compute]
    share = data.draw(st.floats(0, 1))
    faster_links = [
        LinkTime(
            *(share * value for value in (link.forward, link.backward, link.delay)),
            share * link.forward_uplink,
            share * link.backward_uplink,
        )
        for link in links
    ]
    before = step_seconds(compute, links, microbatches)
    assert step_seconds(faster, links, microbatches) <= before
    assert step_seconds(compute, faster_links, microbatches) <= before


@given(chains())
def test_a_step_becomes_longer_when_its_bottleneck_becomes_slower(
    case: tuple[list[float], list[LinkTime], int],
) -> None:
    compute, links, microbatches = case
    found = StepTime(tuple(compute), tuple(links), microbatches)
    assert found.seconds == step_seconds(compute, links, microbatches)
    assert all(0 <= share <= 1 + 1e-9 for share in found.utilization)
    resource = found.bottleneck
    assert (resource is not None) == (found.seconds > 0)
    if resource is None:
        return
    slower_compute, slower_links = list(compute), list(links)
    if resource.kind == "computing":
        slower_compute[resource.position] *= 2
    else:
        i = min(resource.position, resource.other)
        link, is_downstream = links[i], resource.position < resource.other
        slower_links[i] = LinkTime(
            link.forward * (2 if resource.kind == "sending" and is_downstream else 1),
            link.backward * (2 if resource.kind == "sending" and not is_downstream else 1),
            link.delay * (2 if resource.kind == "latency" else 1),
            link.forward_uplink,
            link.backward_uplink,
        )
    assert step_seconds(slower_compute, slower_links, microbatches) > found.seconds * (1 - 1e-9)


def test_the_bottleneck_is_named() -> None:
    assert (
        str(
            StepTime(
                (
                    1,
                    5,
                ),
                (LinkTime(0.1, 0.1, 0),),
                4,
            ).bottleneck
        )
        == "computing of member 1"
    )
    assert (
        str(
            StepTime(
                (
                    1,
                    1,
                ),
                (LinkTime(0.1, 9, 0),),
                4,
            ).bottleneck
        )
        == "sending from member 1 to 0"
    )
    assert (
        str(
            StepTime(
                (
                    1,
                    1,
                ),
                (LinkTime(0, 0, 9),),
                4,
            ).bottleneck
        )
        == "latency between members 0 and 1"
    )
    spec = resolve("nano")
    slow, fast = MEGABIT / 100, 100 * MEGABIT
    for capacities, sentence in [
        ((capacity(up=slow, down=fast), capacity(up=fast, down=fast)), "uplink of ..peer-0"),
        ((capacity(up=fast, down=slow), capacity(up=fast, down=fast)), "downlink of ..peer-0"),
        ((capacity(flops=1e3, up=fast), capacity(up=fast)), "computing of ..peer-0"),
    ]:
        known = survey(*capacities)
        replica = Replica(0, chain(spec), (Link(8, Dialer.UPSTREAM),))
        assert str(predict(spec, known, [replica]).replicas[0].bottleneck) == sentence


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_of_a_stage_are_counted_as_the_node_creates_them(name: str) -> None:
    spec = resolve(name)
    for stage in range(spec.swarm.stages):
        assert spec.parameters_of(stage) == scalars_of(spec, stage)


@pytest.mark.parametrize(
    ("dtype", "gradients"),
    [("bf16", ""), ("dither5", ""), ("dither5", "dither3"), ("dither3", "bf16")],
)
@pytest.mark.parametrize("vocabulary", [256, 300, 70_000])
def test_message_bytes_equal_the_bytes_that_the_node_packs(
    dtype: str, gradients: str, vocabulary: int
) -> None:
    overrides = {"link.dtype": dtype, "link.gradient_dtype": gradients, "model.vocabulary": vocabulary}
    spec = resolve("nano", overrides=overrides)
    size, context = spec.inner.microbatch_size, spec.model.context
    _, ids = pack_ids("tokens", torch.zeros(size, context + 1, dtype=torch.int64), vocabulary)
    for k in (0, 8):
        values = torch.zeros(size, context, k or spec.model.width)
        _, forward = pack_activation("activation", values, dtype)
        _, backward = pack_activation("gradient", values, gradients or dtype)
        assert message_bytes(spec, k) == (len(forward) + len(ids), len(backward))


def test_flops_of_all_stages_add_up_to_six_per_weight_and_token_and_the_attention() -> None:
    spec = resolve("nano")
    model, tokens = spec.model, spec.inner.microbatch_size * spec.model.context
    matrices = sum(
        parameter.numel()
        for stage in range(spec.swarm.stages)
        for name, parameter in Stage(spec, stage).named_parameters()
        if parameter.dim() == 2 and name != "emb"
    )
    attention = 12 * model.context * model.width * model.layers
    whole = microbatch_flops(spec, StageRange(0, spec.swarm.stages))
    assert whole == tokens * (6 * matrices + attention)
    assert whole == sum(microbatch_flops(spec, StageRange(i, i + 1)) for i in range(spec.swarm.stages))


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("model", [{}, {"model.qk_norm": True}, {"model.norms": "outputs"}], ids=str)
def test_the_memory_planned_for_activations_is_what_autograd_keeps_within_a_third(
    stage: int, model: dict[str, Any]
) -> None:
    spec = resolve(overrides={"model.layers": 6, "swarm.stages": 3, "model.vocabulary": 2000, **model})
    module, model = Stage(spec, stage), spec.model
    shape = (spec.inner.microbatch_size, model.context)
    x = torch.zeros(shape, dtype=torch.int64) if stage == 0 else torch.zeros(*shape, model.width)
    owned = {parameter.data_ptr() for parameter in module.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in owned:
            kept[tensor.data_ptr()] = max(kept.get(tensor.data_ptr(), 0), tensor.untyped_storage().nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        targets = torch.zeros(shape, dtype=torch.int64) if stage == 2 else None
        module(x if stage == 0 else x.requires_grad_(), targets)
    planned = len(spec.layers_of(stage)) * layer_activations(spec)
    assert sum(kept.values()) == pytest.approx(planned, rel=1 / 3)


def test_the_memory_planned_for_the_loss_does_not_grow_beyond_a_chunk() -> None:
    def needed(microbatch_size: int) -> int:
        overrides = {"inner.microbatch_size": microbatch_size, "model.vocabulary": 128_000}
        return memory_needed(resolve("1b", overrides=overrides), StageRange(3, 4), 0)

    assert needed(1) < needed(2) == needed(4)  # a chunk has 2048 tokens, two samples


def test_memory_grows_with_stages_and_microbatches_in_flight_and_on_a_cpu_holds_the_outer_state() -> None:
    spec = resolve("nano")
    one, both = StageRange(0, 1), StageRange(0, 2)
    assert memory_needed(spec, one, 1) < memory_needed(spec, one, 2) < memory_needed(spec, both, 2)
    parameters = spec.parameters_of(0)
    # Weight, gradient, moments, anchor and error feedback.
    assert memory_needed(spec, one, 0, "cpu") >= memory_needed(spec, one, 0, "cuda") + 8 * parameters
    assert memory_needed(spec, one, 0) >= 16 * parameters


@pytest.mark.parametrize("rows", [0, 9])
def test_a_member_behind_a_link_needs_memory_for_its_table(rows: int) -> None:
    plain = resolve("nano")
    spec = resolve("nano", overrides={"link.table": True, "link.table_rows": rows})
    size = sum(map(math.prod, link_table_shapes(spec).values()))
    assert spec.link_table_parameters == size
    assert plain.link_table_parameters == 0
    first, behind = StageRange(0, 1), StageRange(1, 2)
    assert memory_needed(spec, first, 2) == memory_needed(plain, first, 2)
    assert memory_needed(spec, behind, 1) - memory_needed(plain, behind, 1) == 16 * size


def test_a_measured_link_counts_more_than_the_bandwidths_of_its_ends() -> None:
    a, b = PeerId("a"), PeerId("b")
    reported = {
        a: Estimates(capacity(up=2.0, down=8.0, trip=0.4), links=(LinkEstimate(b, 0.1, 5.0),)),
        b: Estimates(capacity(up=4.0, down=3.0, trip=0.2)),
    }
    known = Survey.of(reported)
    assert known.bandwidth(a, b) == 5.0
    assert known.bandwidth(b, a) == 4.0
    seen = Survey.of({**reported, b: replace(reported[b], links=(LinkEstimate(a, 0.0, 0.0, incoming=6.0),))})
    assert seen.bandwidth(a, b) == 6.0
    assert known.delay(a, b) == known.delay(b, a) == 0.05
    without = Survey.of({**reported, a: replace(reported[a], links=())})
    assert without.bandwidth(a, b) == 2.0
    assert without.delay(a, b) == pytest.approx(0.3)
    assert Survey().bandwidth(a, b) == float("inf")
    assert Survey().delay(a, b) == 0.0
    assert Survey().is_blank
    assert not known.is_blank


def test_estimates_count_more_than_what_was_declared_at_the_join() -> None:
    a, b = PeerId("a"), PeerId("b")
    known = Survey.of({a: Estimates(capacity(flops=2.0))}, {a: capacity(flops=1.0), b: capacity(flops=4.0)})
    assert (known.flops(a), known.flops(b)) == (2.0, 4.0)


def test_a_peer_without_a_measured_speed_counts_as_the_median() -> None:
    spec = resolve("nano")
    known = survey(capacity(1e9), capacity(2e9), capacity(9e9), capacity(0))
    stages = StageRange(0, 1)
    assert Costs(spec, known).compute(PeerId("peer-3"), stages) == microbatch_flops(spec, stages) / 2e9
    assert Costs(spec, Survey()).compute(PeerId("peer-3"), stages) == 0.0


def test_only_a_member_in_the_middle_shares_its_uplink() -> None:
    """Its two messages share the uplink in turn; peers in one home do not use it."""
    spec = resolve("nano", overrides={"model.layers": 3, "swarm.stages": 3, "inner.microbatches": 8})
    lines = capacity(1e12, up=MEGABIT, down=10 * MEGABIT)
    apart = Costs(spec, survey(lines, lines, lines)).step(chain(spec), (8, 8)).seconds
    forward, backward = (size / MEGABIT for size in message_bytes(spec, 8))
    assert apart > 8 * (forward + backward)
    a, b = PeerId("peer-0"), PeerId("peer-1")
    home = replace(
        survey(lines, lines, lines),
        links={(a, b): LinkEstimate(b, 0.0, 1e9), (b, a): LinkEstimate(a, 0.0, 1e9)},
    )
    assert Costs(spec, home).link(a, b, 8).backward_uplink == pytest.approx(backward * MEGABIT / 1e9)
    together = Costs(spec, home).step(chain(spec), (8, 8)).seconds
    assert 8 * forward < together < 8 * (forward + backward)


def test_muon_needs_one_moment_less_and_computes_more_in_a_step() -> None:
    spec = resolve("nano")
    other = resolve("nano", overrides={"inner.optimizer": "muon"})
    whole = StageRange(0, spec.swarm.stages)
    matrices = spec.model.layers * spec.model.layer_matrices
    assert memory_needed(spec, whole, 1) - memory_needed(other, whole, 1) == 4 * matrices
    d, f, q, k = spec.model.width, spec.model.feed_forward, spec.model.query_width, spec.model.key_width
    sides = [(q, d), (q, d), (k, d), (k, d), (f, d), (f, d), (f, d)]
    turned = sum(5 * (4 * min(each) ** 2 * max(each) + 2 * min(each) ** 3) for each in sides)
    more = microbatch_flops(other, whole) - microbatch_flops(spec, whole)
    assert more * spec.inner.microbatches == pytest.approx(spec.model.layers * turned)
    assert other.hash != spec.hash
