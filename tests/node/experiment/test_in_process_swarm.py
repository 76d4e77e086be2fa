"""A swarm in one process computes what real members compute, and the same again every time."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch

from node.experiment.in_process_replica import plan_of
from node.experiment.in_process_swarm import LocalSwarm
from node.experiment.variation import Variation
from protocol.codec.payload import decode
from protocol.run_files.resolve import resolve
from protocol.spec.run import RunSpec
from protocol.types import StageRange
from tests.support.local_swarms import anchors, parameters
from tests.support.running_replica import RunningReplica, plain_loop, spec_of

pytestmark = pytest.mark.usefixtures("one_thread")


def mixed(**overrides: Any) -> RunSpec:
    """Two full replicas and a pipeline of four members."""
    small = {"swarm.replicas": 2, "inner.steps": 3, "inner.microbatches": 1, "inner.microbatch_size": 1}
    return spec_of(**{**small, **overrides})


def embeddings(swarm: LocalSwarm) -> set[str]:
    return {member.outer.embedding_digest() for replica in swarm.replicas for member in replica.members}


def test_the_plan_has_the_replicas_of_the_spec_and_its_members_tile_the_stages() -> None:
    spec = resolve("tiny", overrides={"model.layers": 5, "swarm.stages": 5, "swarm.replicas": 1,
                                      "swarm.pipelines": 2, "swarm.members": 3})  # fmt: skip
    plan = plan_of(spec)
    assert [len(replica.members) for replica in plan.replicas] == [1, 3, 3]
    assert plan.replicas[0].members[0].stages == StageRange(0, 5)
    assert [member.stages for member in plan.replicas[1].members] == [
        StageRange(0, 2),
        StageRange(2, 4),
        StageRange(4, 5),
    ]
    assert [link.k for link in plan.replicas[2].links] == [spec.link.k] * 2


@pytest.mark.parametrize(
    ("dtype", "overlap"),
    [
        ("bf16", 0),
        ("dither5", 2),
        ("dither3", 2),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (("bf16", 2), ("dither5", 0), ("dither3", 0))
        ),
    ],
)
def test_anchors_are_bit_equal_over_all_replicas_after_every_round(dtype: str, overlap: int) -> None:
    swarm = LocalSwarm(mixed(**{"link.dtype": dtype, "outer.overlap": overlap}))
    seen = set()
    for round_number in range(1, 4):
        report = swarm.train_round()
        assert report.round_number == swarm.position == round_number
        assert report.contributions == (3, 3, 3, 3)
        first, *others = anchors(swarm)
        assert all(other == first for other in others)
        assert len(embeddings(swarm)) == 1
        seen.add(tuple(first))
    assert len(seen) == 3


def test_the_same_spec_gives_the_same_bits_again() -> None:
    runs = []
    for _ in range(2):
        swarm = LocalSwarm(mixed(**{"outer.overlap": 1, "swarm.replicas": 1}))
        runs.append(([swarm.train_round() for _ in range(2)], swarm.validate(), anchors(swarm)))
    assert runs[0] == runs[1]


async def test_a_round_equals_that_of_members_that_talk_over_real_links_in_every_bit() -> None:
    spec = mixed(**{"link.dtype": "bf16", "swarm.replicas": 0, "inner.microbatches": 2})
    swarm = LocalSwarm(spec)
    swarm.train()
    async with AsyncExitStack() as stack:
        real = RunningReplica(spec, members=4)
        await real.start(stack)
        loss = await real.inner_phase(1, 0)
        for stage in range(spec.swarm.stages):
            payload = real.trainer_of(stage).outer.propose(stage)
            assert payload is not None
            real.commit(stage, 1, [(payload, 1.0)])
        report = swarm.exchange()
        assert report.train_loss == loss
        assert swarm.validate() == [await real.validate(1)]
    expected = real.parameters()
    assert all(torch.equal(value, expected[name]) for name, value in parameters(swarm.replicas[0]).items())


def test_one_full_replica_with_dense_exchange_equals_the_plain_loop() -> None:
    dense = {"outer.top_k": 0, "outer.quantizer": "none", "swarm.replicas": 1, "swarm.pipelines": 0}
    spec = spec_of(**dense, rounds=3)
    expected_losses, expected = plain_loop(spec, rounds=3)
    swarm = LocalSwarm(spec)
    losses = [swarm.train_round().train_loss for _ in range(3)]
    per_round = [sum(pair) / 2 for pair in zip(expected_losses[::2], expected_losses[1::2], strict=True)]
    assert losses == pytest.approx(per_round, rel=1e-4)
    for name, value in parameters(swarm.replicas[0]).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-5, msg=name)


def test_overlap_delays_the_update_by_its_steps_and_the_last_round_ends_on_the_anchor() -> None:
    """One replica that sends everything loses nothing by waiting: its own update is what it has already."""
    dense = {"outer.top_k": 0, "outer.quantizer": "none", "swarm.replicas": 1, "swarm.pipelines": 0}
    usual, overlapped = (
        LocalSwarm(spec_of(**dense, rounds=3, **{"outer.overlap": overlap, "inner.steps": 4}))
        for overlap in (0, 3)
    )
    for round_number in range(1, 4):
        usual.train_round()
        overlapped.train_round()
        # What was learned in the overlapping steps is not in the anchor yet.
        assert _is_at_anchor(usual)
        assert _is_at_anchor(overlapped) == (round_number == 3)
    expected = parameters(usual.replicas[0])
    for name, value in parameters(
        overlapped.replicas[0]
    ).items():  # the estimate of a single replica is right
        torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-5, msg=name)


def _is_at_anchor(swarm: LocalSwarm) -> bool:
    anchor = {
        name: value
        for member in swarm.replicas[0].members
        for outer in member.outer.values()
        for name, value in outer.anchor.items()
    }
    return all(torch.equal(value, anchor[name]) for name, value in parameters(swarm.replicas[0]).items())


@pytest.mark.parametrize(
    ("dtype", "gradients", "bytes_there_and_back"), [("bf16", "", 16 + 16), ("dither5", "dither3", 6 + 4)]
)
def test_links_carry_what_the_codec_of_activations_says_and_full_replicas_send_nothing(
    dtype: str, gradients: str, bytes_there_and_back: int
) -> None:
    formats = {"link.dtype": dtype, "link.gradient_dtype": gradients}
    spec = mixed(**{"link.k": 8, **formats, "swarm.replicas": 1, "inner.microbatches": 2})
    swarm = LocalSwarm(spec)
    report = swarm.train_round()
    assert swarm.replicas[0].bytes_sent == 0
    frames = spec.inner.steps * spec.inner.microbatches * 3  # over three links
    tokens = spec.inner.microbatch_size * spec.model.context
    ids = spec.inner.microbatch_size * (spec.model.context + 1)  # a byte each, forward only
    assert report.link_bytes == frames * (tokens * bytes_there_and_back + ids)
    payload = sum(outer.layout.nbytes for outer in swarm.replicas[0].members[0].outer.values())
    assert report.payload_bytes == 2 * payload
    swarm.validate()
    assert swarm.train_round().link_bytes == report.link_bytes


def test_activations_and_gradients_have_the_formats_of_their_direction() -> None:
    spec = mixed(**{"link.k": 8, "link.dtype": "dither5", "link.gradient_dtype": "dither3"})
    swarm = LocalSwarm(spec)
    members, message, activations = swarm.replicas[-1].members, None, []
    for member in members:
        member.begin_round(1, range(spec.samples_per_round()))
        message = member.forward(0, 0, message)
        activations.append(message)
    gradient = members[-1].backward(0, None)
    assert gradient is not None
    assert activations[0] is not None
    assert {header.name: header.shape[-1] for header in activations[0].tensors}["activation"] == 5
    assert {header.name: header.shape[-1] for header in gradient.tensors}["gradient"] == 3


def test_a_replica_that_left_the_finite_numbers_contributes_nothing_and_starts_again() -> None:
    swarm = LocalSwarm(mixed())
    swarm.train_round()
    with torch.no_grad():
        swarm.replicas[1].members[0].modules[0].canonical_parameters()["0.wq"][0, 0] = float("nan")
    assert swarm.train_round().contributions == (2, 2, 2, 2)
    assert len(set(map(tuple, anchors(swarm)))) == 1
    assert swarm.train_round().contributions == (3, 3, 3, 3)


def test_any_member_that_left_the_finite_numbers_starts_again_at_the_end_of_its_phase() -> None:
    spec = mixed(**{"swarm.replicas": 0, "swarm.pipelines": 1})
    (replica,) = LocalSwarm(spec).replicas
    poisoned = replica.members[0].modules[0].canonical_parameters()["0.wq"]
    replica.train(range(1))
    with torch.no_grad():
        poisoned[0, 0] = float("nan")
    replica.train(range(1, spec.inner.steps))
    assert replica.end_inner_phase().skipped_steps == spec.inner.steps - 1
    assert poisoned.isfinite().all()


def test_a_round_without_contributions_leaves_the_anchors_as_they_were() -> None:
    swarm = LocalSwarm(mixed(**{"swarm.replicas": 1, "swarm.pipelines": 0}))
    before = anchors(swarm)
    with torch.no_grad():
        swarm.replicas[0].members[0].modules[0].canonical_parameters()["0.wq"][0, 0] = float("nan")
    assert swarm.train_round().contributions == (0, 0, 0, 0)
    assert anchors(swarm) == before
    assert swarm.train_round().contributions == (1, 1, 1, 1)


def test_replicas_may_have_links_of_unlike_width() -> None:
    spec = mixed(**{"swarm.replicas": 0, "swarm.pipelines": 2})
    plan = plan_of(spec)
    wide, narrow = plan.replicas
    narrow = replace(narrow, links=tuple(replace(link, k=2) for link in narrow.links))
    swarm = LocalSwarm(spec, plan=replace(plan, replicas=(wide, narrow)))
    swarm.train_round()
    assert swarm.replicas[1].bytes_sent < swarm.replicas[0].bytes_sent
    assert len(set(swarm.validate())) == 2


def test_what_is_not_sent_is_left_for_the_next_round() -> None:
    swarm = LocalSwarm(mixed())
    swarm.train_round()
    swarm.train()
    trainer = swarm.replicas[0].members[0]
    outer, local = trainer.outer[1], trainer.modules[1].canonical_parameters()
    tensors = {
        name: outer.layout.outer.error_decay * outer.error[name] + (anchor - local[name].detach())
        for name, anchor in outer.anchor.items()
    }
    payload = trainer.outer.propose(1)
    assert payload is not None
    swarm.exchange()
    for name, sparse in decode(outer.layout, payload).items():
        sent = torch.zeros_like(tensors[name])
        sparse.add_to(sent.view(-1), 1.0)
        torch.testing.assert_close(sent + outer.error[name], tensors[name], rtol=0, atol=1e-7, msg=name)


def test_replicas_that_come_and_go_divide_a_constant_batch() -> None:
    batch = {"grouping.batch": "constant", "grouping.global_batch": 12, "inner.microbatches": 2}
    spec = mixed(**{**batch, "rounds": 4, "inner.microbatch_size": 2})
    variation = Variation(replicas_by_round=((1, 2), (2, 1), (3, 3)))

    def trained(swarm: LocalSwarm, rounds: int) -> list[tuple[int, ...]]:
        reports = [swarm.train_round() for _ in range(rounds)]
        first, *others = anchors(swarm)
        assert all(each[: spec.swarm.stages] == first[: spec.swarm.stages] for each in others)
        return [tuple(result.tokens for result in report.inner) for report in reports]

    swarm = LocalSwarm(spec, variation=variation)
    tokens = 12 * spec.inner.steps * spec.model.context
    assert trained(swarm, 4) == [(tokens // 2,) * 2, (tokens,), (tokens // 3,) * 3, (tokens // 3,) * 3]
    # The last replica began with round 3, with moments of its own.
    steps = [replica.members[0].inner.state_dict()[0] for replica in swarm.replicas]
    taken = [each["steps"] for each in steps if each is not None]
    assert taken == [4 * spec.inner.steps, 2 * spec.inner.steps, 2 * spec.inner.steps]
