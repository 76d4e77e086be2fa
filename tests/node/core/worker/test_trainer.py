"""The invariants of training: splitting a replica, k = d, and one replica alone change nothing.

Members run the production pipeline over real gRPC links; their workers run in threads of this process.
"""

from __future__ import annotations

import math
import struct
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from node.core.worker.compute import Compute
from node.core.worker.factories import run_basis
from node.core.worker.trainer import Trainer
from node.data.stream import open_stream
from node.experiment.in_process_replica import LocalReplica
from node.ipc.worker_calls import Message
from node.net.link import FrameRefused
from protocol.codec.activation import pack_activation
from protocol.errors import ErrorCode, HetnodeError
from protocol.math.subspace import ReceivingEnd
from protocol.types import StageRange
from tests.support.running_replica import RunningReplica, plain_loop, replica_of, spec_of, with_k

pytestmark = pytest.mark.usefixtures("one_thread")
APART = {"data.tokenizer": "tokenizer.json", "data.pack": "documents", "data.separator": ord("\n")}
"""Lines of text are documents of their own, for a member that is given bytes."""


@pytest.mark.parametrize("members", [1, 2, 4])
async def test_a_replica_of_any_number_of_members_equals_the_single_process(members: int) -> None:
    spec = spec_of(**{"link.k": 0})
    expected_losses, expected = plain_loop(spec, rounds=1)
    async with AsyncExitStack() as stack:
        replica = RunningReplica(spec, members)
        await replica.start(stack)
        loss = await replica.inner_phase(1, 0)
    assert loss == pytest.approx(sum(expected_losses) / len(expected_losses), rel=1e-6)
    for name, parameter in replica.parameters().items():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.parametrize(("sent", "expected"), [(0, 8), (8, 0)])
def test_a_message_of_another_k_than_the_plan_has_is_refused(sent: int, expected: int) -> None:
    """Also if it is uncompressed where the link compresses, or the other way round."""
    spec = spec_of(**{"swarm.stages": 2})
    first, last = Trainer(spec, StageRange(0, 1), stream=open_stream(spec)), Trainer(spec, StageRange(1, 2))
    first.connect(None, sent)
    last.connect(expected, None)
    for trainer in (first, last):
        trainer.begin_round(1, range(spec.samples_per_round()))
    message = first.forward(0, 0, None)
    assert message is not None
    with pytest.raises(HetnodeError, match=rf"not f32 .* {expected or spec.model.width}\]") as refused:
        last.forward(0, 0, message)
    assert refused.value.code is ErrorCode.FRAME_CORRUPT
    first.abandon()
    # A gradient travels the other way.
    first.connect(None, expected)
    last.connect(expected, None)
    forward = first.forward(0, 0, None)
    assert last.forward(0, 0, forward) is None
    last.hosted.upstream = ReceivingEnd(sent, run_basis(spec, 1), last.outer.embedding)
    gradient = last.backward(0, None)
    with pytest.raises(HetnodeError, match=r"Tensor 'gradient' is") as refused:
        first.backward(0, gradient)
    assert refused.value.code is ErrorCode.FRAME_CORRUPT


async def test_neither_members_nor_links_of_full_width_change_the_losses() -> None:
    losses = []
    for members, k in ((1, 0), (2, 0), (2, 32)):
        async with AsyncExitStack() as stack:
            replica = RunningReplica(spec_of(**{"link.k": k, "inner.steps": 5}), members)
            await replica.start(stack)
            losses.append([await replica.inner_phase(1, 0), await replica.validate(1)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[2] == pytest.approx(losses[1], rel=1e-4)


def test_documents_are_apart_on_every_member() -> None:
    """A member in the middle knows the documents from the tokens, which each message has for T_perp."""
    bytes_alone = spec_of(**{"link.k": 0})
    stream = open_stream(bytes_alone)
    apart = spec_of(**{"link.k": 0}, **APART)
    losses = []
    for spec, members in ((bytes_alone, 1), (apart, 1), (apart, 4)):
        replica = LocalReplica(spec, replica_of(spec, members), Compute(), stream)
        replica.begin_round(1, range(spec.samples_per_round()))
        replica.train(range(spec.inner.steps))
        losses.append((replica.end_inner_phase().loss, replica.validate()))
    assert losses[2] == pytest.approx(losses[1], rel=1e-5)
    assert losses[1] != pytest.approx(losses[0], rel=1e-4)


async def test_compression_does_change_the_forward_mode() -> None:
    """Guards the test above: with k < d the links must not be transparent."""
    losses = []
    for k in (0, 2):
        async with AsyncExitStack() as stack:
            replica = RunningReplica(spec_of(**{"link.k": k}), members=2)
            await replica.start(stack)
            losses.append(await replica.validate(0))
    assert abs(losses[0] - losses[1]) > 1e-5


@pytest.mark.parametrize("k", [16, 4, 0])
async def test_a_k_that_moves_at_a_round_boundary_equals_a_fresh_start_with_it(
    tmp_path: Path, k: int
) -> None:
    """The bases are nested and depend on the seed alone, so nothing of the former k is left in a link."""
    spec = spec_of(**{"link.k": 8, "swarm.stages": 2, "rounds": 3})
    async with AsyncExitStack() as stack:
        moved, fresh = RunningReplica(spec, 2), RunningReplica(spec, 2, k=k)
        for replica in (moved, fresh):
            await replica.start(stack)
        await moved.inner_phase(1, 0)
        for stage in range(spec.swarm.stages):
            payload = moved.trainer_of(stage).outer.propose(stage)
            assert payload is not None
            moved.commit(stage, 1, [(payload, 1.0)])
        for position, (worker, heir) in enumerate(zip(moved.workers, fresh.workers, strict=True)):
            folder = tmp_path / str(position)
            worker.trainer.write_checkpoint(folder / "round-000001", 1)
            assert heir.trainer.restore(folder) is not None
        await moved.adopt(with_k(moved.replica, k), epoch=2)
        losses = [await replica.inner_phase(2, spec.samples_per_round()) for replica in (moved, fresh)]
        assert losses[0] == losses[1]
        assert math.isfinite(losses[0])
        assert await moved.validate(2) == await fresh.validate(2)
    expected = fresh.parameters()
    assert all(torch.equal(parameter, expected[name]) for name, parameter in moved.parameters().items())


@pytest.mark.parametrize("members", [1, 2])
async def test_a_replica_may_take_more_or_fewer_microbatches_from_a_round_on(members: int) -> None:
    spec = spec_of(**{"link.k": 0, "inner.microbatches": 4})
    wide = spec_of(**{"link.k": 0, "inner.microbatches": 6})
    async with AsyncExitStack() as stack:
        grown, usual = RunningReplica(spec, members), RunningReplica(wide, 1)
        for replica in (grown, usual):
            await replica.start(stack)
        await grown.adopt(replace(grown.replica, microbatches=6), epoch=2)
        losses = [await replica.inner_phase(1, 0) for replica in (grown, usual)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    expected = usual.parameters()
    for name, parameter in grown.parameters().items():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.parametrize("pieces", [2, 3, 64])
@pytest.mark.parametrize("cut", [(2,), (1, 2)])
def test_a_microbatch_that_is_computed_in_pieces_has_the_same_loss_and_gradients(
    pieces: int, cut: tuple[int, ...]
) -> None:
    spec = spec_of(**{"swarm.stages": 2, "inner.microbatch_size": 4})
    found = []
    for each in (1, pieces):
        stages = [StageRange(*pair) for pair in pairwise((0, *cut))]
        chain = [Trainer(spec, hosted, Compute(pieces=each), open_stream(spec)) for hosted in stages]
        chain[0].connect(None, 8 if chain[1:] else None)
        for last in chain[1:]:
            last.connect(8, None)
        for trainer in chain:
            trainer.begin_round(1, range(spec.samples_per_round()))
        message = None
        for trainer in chain:
            message = trainer.forward(0, 0, message)
        for trainer in reversed(chain):
            message = trainer.backward(0, message)
        gradients = {
            (stage, name): parameter.grad
            for trainer in chain
            for stage, module in trainer.modules.items()
            for name, parameter in module.named_parameters()
        }
        found.append((float(chain[-1].hosted.losses[0]), gradients))
    (loss, expected), (other_loss, others) = found
    assert other_loss == pytest.approx(loss, rel=1e-6 if len(cut) == 1 else 1e-4)
    for name, gradient in expected.items():
        assert gradient is not None
        # What crosses a link is rounded to bfloat16, perhaps to the neighbour of a value.
        most = 1e-5 if len(cut) == 1 else 4e-3
        assert float((others[name] - gradient).norm()) <= most * float(gradient.norm()), name


def test_gradients_of_uneven_shares_weigh_as_much_as_their_samples() -> None:
    """sum_m w_m g_m / sum_m w_m is the gradient of all samples: w_m = microbatches / those of the spec."""
    spec = spec_of(**{"swarm.stages": 2, "inner.microbatches": 2})
    stream, size = open_stream(spec), spec.inner.microbatch_size

    def gradient(first: int, microbatches: int) -> dict[str, torch.Tensor]:
        trainer = Trainer(spec, StageRange(0, 2), stream=stream)
        trainer.begin_round(1, range(first, first + spec.samples_per_round(microbatches)))
        for microbatch in range(microbatches):
            trainer.forward(0, microbatch, None)
            trainer.backward(microbatch, None)
        return {
            name: parameter.grad
            for module in trainer.modules.values()
            for name, parameter in module.canonical_parameters().items()
            if parameter.grad is not None
        }

    shares = {0: 3, 3 * size: 1}
    weights = [share / spec.inner.microbatches for share in shares.values()]
    assert weights == [1.5, 0.5]
    parts = [gradient(first, share) for first, share in shares.items()]
    whole = gradient(0, 4)
    assert parts[0].keys() == whole.keys()
    for name, expected in whole.items():
        weighted = sum(weight * part[name] for weight, part in zip(weights, parts, strict=True)) / sum(
            weights
        )
        torch.testing.assert_close(weighted, expected, rtol=1e-4, atol=1e-7, msg=name)


async def test_payloads_of_uneven_shares_move_the_anchor_by_their_weighted_mean() -> None:
    """theta <- theta - eta (sum_m w_m delta_m) / (sum_m w_m), on replicas that end with the same bits."""
    spec = spec_of(
        **{"swarm.stages": 2, "outer.top_k": 0, "outer.quantizer": "none", "inner.microbatches": 2}
    )
    shares = {0: 3, 1: 1}
    async with AsyncExitStack() as stack:
        replicas = [RunningReplica(spec, 1, 0), RunningReplica(spec, 2, 1)]
        before: dict[str, torch.Tensor] = {}
        first = 0
        for replica in replicas:
            await replica.start(stack)
            share = shares[replica.replica.index]
            before = {name: value.clone() for name, value in replica.parameters().items()}
            await replica.adopt(replace(replica.replica, microbatches=share, weight=share / 2), epoch=2)
            await replica.inner_phase(1, first)
            first += spec.samples_per_round(share)
        learned = [
            {name: before[name] - value for name, value in replica.parameters().items()}
            for replica in replicas
        ]
        digests = set()
        for stage in range(2):
            payloads = []
            for replica in replicas:
                payload = replica.trainer_of(stage).outer.propose(stage)
                assert payload is not None
                payloads.append((payload, replica.replica.weight))
            digests.add(tuple({replica.commit(stage, 1, payloads) for replica in replicas}))
    assert all(len(equal) == 1 for equal in digests)
    after = replicas[0].parameters()
    for name, anchor in before.items():
        expected = anchor - (1.5 * learned[0][name] + 0.5 * learned[1][name]) / 2
        torch.testing.assert_close(after[name], expected, rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.parametrize("dtype", ["bf16", "dither5"])
async def test_anchors_of_full_and_pipeline_replicas_are_bit_equal_after_every_round(dtype: str) -> None:
    short = {"inner.steps": 1, "inner.microbatches": 2}
    spec = spec_of(**{"link.k": 8, "link.dtype": dtype, "rounds": 3, **short})
    async with AsyncExitStack() as stack:
        replicas = [RunningReplica(spec, 1, 0), RunningReplica(spec, 2, 1), RunningReplica(spec, 4, 2)]
        for replica in replicas:
            await replica.start(stack)
        for round_number in range(1, 4):
            for number, replica in enumerate(replicas):
                first = ((round_number - 1) * len(replicas) + number) * spec.samples_per_round()
                await replica.inner_phase(round_number, first)
            for stage in range(spec.swarm.stages):
                proposals = [replica.trainer_of(stage).outer.propose(stage) for replica in replicas]
                payloads = [(proposal, 1.0) for proposal in proposals if proposal is not None]
                assert len(payloads) == 3
                assert len({replica.commit(stage, round_number, payloads) for replica in replicas}) == 1
            embeddings = {
                worker.trainer.outer.embedding_digest() for replica in replicas for worker in replica.workers
            }
            assert len(embeddings) == 1


async def test_one_full_replica_with_dense_exchange_equals_the_plain_loop() -> None:
    dense = {"outer.top_k": 0, "outer.quantizer": "none", "inner.microbatches": 2}
    spec = spec_of(**dense, rounds=3)
    expected_losses, expected = plain_loop(spec, rounds=3)
    losses = []
    async with AsyncExitStack() as stack:
        replica = RunningReplica(spec, 1)
        await replica.start(stack)
        for round_number in range(1, 4):
            losses.append(
                await replica.inner_phase(round_number, (round_number - 1) * spec.samples_per_round())
            )
            for stage in range(spec.swarm.stages):
                proposal = replica.trainer_of(stage).outer.propose(stage)
                assert proposal is not None
                replica.commit(stage, round_number, [(proposal, 1.0)])
    per_round = [sum(pair) / 2 for pair in zip(expected_losses[::2], expected_losses[1::2], strict=True)]
    assert losses == pytest.approx(per_round, rel=1e-4)
    for name, parameter in replica.parameters().items():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-3, atol=1e-5, msg=name)


async def test_an_aborted_round_changes_nothing_and_loses_nothing() -> None:
    spec = spec_of(**{"swarm.stages": 2})
    async with AsyncExitStack() as stack:
        replica = RunningReplica(spec, 1)
        await replica.start(stack)
        await replica.inner_phase(1, 0)
        trainer = replica.trainer_of(0)
        before = {name: tensor.clone() for name, tensor in replica.parameters().items()}
        digest, error = trainer.outer[0].digest(), trainer.outer[0].error["emb"].clone()
        first = trainer.outer.propose(0)
        trainer.outer.abort(0, 1)
        assert trainer.outer[0].digest() == digest
        assert torch.equal(trainer.outer[0].error["emb"], error)
        assert all(torch.equal(tensor, before[name]) for name, tensor in replica.parameters().items())
        assert trainer.outer.propose(0) == first


@pytest.mark.parametrize("members", [1, 2])
async def test_a_value_that_is_not_finite_skips_the_step_on_every_member_and_ends_none(
    members: int,
) -> None:
    spec = spec_of()
    async with AsyncExitStack() as stack:
        replica = RunningReplica(spec, members)
        await replica.start(stack)
        with torch.no_grad():
            replica.trainer_of(0).modules[0].canonical_parameters()["0.wq"][0, 0] = float("nan")
        await replica.inner_phase(1, 0)
        results = [worker.trainer.end_inner_phase() for worker in replica.workers]
        assert [result.skipped_steps for result in results] == [spec.inner.steps] * members
        # So it has nothing to offer, and starts again from the anchor.
        await replica.inner_phase(2, spec.samples_per_round())
        assert [worker.trainer.end_inner_phase().skipped_steps for worker in replica.workers] == [0] * members


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
async def test_a_moment_that_is_not_finite_costs_one_round(optimizer: str) -> None:
    """Memory without error correction flips bits: who keeps such moments would never train again."""
    spec = spec_of(**{"inner.optimizer": optimizer})
    async with AsyncExitStack() as stack:
        replica = RunningReplica(spec, 1)
        await replica.start(stack)
        trainer, skipped = replica.trainer_of(0), []
        for number in (1, 2, 3):
            await replica.inner_phase(number, (number - 1) * spec.samples_per_round())
            skipped.append(trainer.end_inner_phase().skipped_steps)
            if number == 1:
                state = trainer.inner.state_dict()
                moments = state[0]
                assert moments is not None
                moments["exp_avg"]["0.wq"][0, 0] = float("nan")
                trainer.inner.load_state_dict(state)
        assert skipped == [0, spec.inner.steps - 1, 0]
        parameters = trainer.modules[0].canonical_parameters().values()
        assert all(each.isfinite().all() for each in parameters)


@pytest.mark.parametrize("dtype", ["bf16", "dither5"])
@pytest.mark.parametrize("name", ["activation", "gradient"])
def test_a_frame_with_one_value_that_is_not_finite_is_refused(name: str, dtype: str) -> None:
    spec = spec_of(**{"swarm.stages": 2, "link.dtype": dtype})
    first, last = Trainer(spec, StageRange(0, 1), stream=open_stream(spec)), Trainer(spec, StageRange(1, 2))
    first.connect(None, 8)
    last.connect(8, None)
    for trainer in (first, last):
        trainer.begin_round(1, range(spec.samples_per_round()))
    forward = first.forward(0, 0, None)
    assert forward is not None
    values = torch.zeros(spec.inner.microbatch_size, spec.model.context, 8)
    values[0, 3, 5] = math.nan
    tensors, data = pack_activation(name, values, dtype)
    ids = forward.tensors[-1]
    both = Message((*tensors, ids), data + forward.payload[-ids.nbytes :])
    with pytest.raises(HetnodeError, match=f"'{name}' holds values that are not finite") as refused:
        _ = first.backward(0, Message(tensors, data)) if name == "gradient" else last.forward(0, 0, both)
    assert refused.value.code is ErrorCode.FRAME_CORRUPT


@pytest.mark.parametrize("position", [0, 1])
async def test_an_honest_member_sends_no_value_that_is_not_finite_and_all_skip_the_step(
    position: int,
) -> None:
    """Its own parameters are not finite: no neighbour refuses its frames, also not of a validation."""
    spec = spec_of()
    async with AsyncExitStack() as stack:
        replica = RunningReplica(spec, 2)
        await replica.start(stack)
        module = replica.workers[position].trainer.modules[2 * position]
        with torch.no_grad():
            module.canonical_parameters()[f"{2 * position}.wq"][0, 0] = math.inf
        await replica.validate(0)
        await replica.inner_phase(1, 0)
        results = [worker.trainer.end_inner_phase() for worker in replica.workers]
        assert [result.skipped_steps for result in results] == [spec.inner.steps] * 2
        # Whose values were not finite, and from which step on.
        assert [result.nonfinite_step for result in results] == [int(i == position) for i in range(2)]
        await replica.inner_phase(2, spec.samples_per_round())
        assert [worker.trainer.end_inner_phase().skipped_steps for worker in replica.workers] == [0] * 2


async def test_who_refuses_a_frame_names_its_sender() -> None:
    async with AsyncExitStack() as stack:
        replica = RunningReplica(spec_of(), 2)
        await replica.start(stack)
        hosted = replica.workers[1].trainer.hosted
        honest = hosted.backward

        def poisoned(*given: Any) -> Message | None:
            message = honest(*given)
            assert message is not None
            poison = struct.pack("<f", math.nan)
            return Message(message.tensors, poison + message.payload[len(poison) :])

        hosted.backward = poisoned  # type: ignore[method-assign]
        with pytest.raises(FrameRefused, match="not finite") as refused:
            await replica.inner_phase(1, 0)
        assert refused.value.sender == replica.replica.members[1].peer
