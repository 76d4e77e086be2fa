"""The outer round as a transaction: nothing learned is lost, and equal rounds give equal bits."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from node.core.model.init import initial_parameters
from node.core.optimizer.embedding_follower import EmbeddingFollower
from node.core.optimizer.outer_stage import OuterStage
from node.ipc.stored_payload import StoredPayload, sha256_of
from node.ranks.remote_tensors import RemoteTensor
from protocol.codec.payload import decode
from protocol.errors import ErrorCode, HetnodeError
from protocol.math.clipping import clipping_scales, payload_norm
from protocol.math.digest import CHUNK_BYTES, digest_of, header_of
from protocol.math.outer_step import anchor_digest, apply_update, factors_of
from protocol.math.topk import SparseTensor
from protocol.spec.outer import OuterSpec
from protocol.spec.quantizers import INDEX_CODES
from tests.support.outer_replica import Replica
from tests.support.paths import ROOT
from tests.support.reference import small_spec

CODECS: list[dict[str, Any]] = [
    {"quantizer": "2bit"},
    {"quantizer": "none"},
    {"quantizer": "1bit", "indices": list(INDEX_CODES)[-1]},
    {"top_k": 0},
    {"optimizer": "nesterov"},
]
SPEC = small_spec()


def assert_unchanged(replica: Replica, before: list[Tensor]) -> None:
    assert all(torch.equal(now, then) for now, then in zip(replica.snapshot(), before, strict=True))


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_replicas_that_apply_the_same_rounds_stay_equal_in_every_bit(codec: dict[str, Any]) -> None:
    spec = small_spec(outer=codec | {"learning_rate": 0.7})
    replicas = [Replica(spec, seed) for seed in range(3)]
    follower = EmbeddingFollower(spec, initial_parameters(spec, 0)["emb"])
    digests = {replicas[0].outer.digest()}
    for round_number in range(4):
        payloads = []
        for replica in replicas:
            replica.train()
            payloads.append((replica.propose(), 1.0 + round_number))
        # In round 2 the manifest leaves out the last replica.
        included = 2 if round_number == 2 else 3
        for index, replica in enumerate(replicas):
            replica.outer.commit(payloads[:included], index < included, replica.local)
        follower.commit(payloads[:included])
        agreed = {replica.outer.digest() for replica in replicas}
        assert len(agreed) == 1
        assert not agreed & digests, "the anchor has moved"
        digests |= agreed
        assert torch.equal(follower.table_vd, replicas[0].outer.anchor["emb"])
        assert anchor_digest(replicas[0].local) == anchor_digest(replicas[0].outer.anchor)


@pytest.mark.parametrize("codec", CODECS[:4], ids=str)
def test_a_part_of_a_phase_moves_the_anchor_by_its_steps_and_nothing_of_it_is_lost(
    codec: dict[str, Any],
) -> None:
    """The mean is what was learned in all, by the phases behind it, and not by the replicas."""
    spec = small_spec(outer={"clip": 8.0} | codec)
    replicas, shares = [Replica(spec, seed) for seed in range(3)], (1.0, 1.0, 0.4)
    learned = [replica.train() for replica in replicas]
    before = {name: value.clone() for name, value in replicas[0].outer.anchor.items()}
    payloads = [(each.propose(share), share) for each, share in zip(replicas, shares, strict=True)]
    for replica in replicas:
        replica.outer.commit(payloads, True, replica.local)
    for name, anchor in replicas[0].outer.anchor.items():
        moved = (anchor - before[name]).double() * sum(shares)
        total = sum(steps[name].double() for steps in learned)
        kept = sum(replica.outer.error[name].double() for replica in replicas)
        torch.testing.assert_close(moved, total + kept, rtol=0, atol=1e-6)


def test_commit_is_the_mean_over_all_contributors_in_fp32_in_the_order_given() -> None:
    replicas = [Replica(SPEC, seed) for seed in range(3)]
    payloads = []
    for replica in replicas:
        replica.train()
        payloads.append(replica.propose())
    weights = [1.0, 0.3, 2.5]
    outer = replicas[0].outer
    before = {name: value.numpy().copy() for name, value in outer.anchor.items()}
    decoded = [decode(outer.layout, payload) for payload in payloads]
    outer.commit(list(zip(payloads, weights, strict=True)), True, replicas[0].local)
    for name, anchor in before.items():
        total = np.zeros(anchor.size, np.float32)
        for content, factor in zip(decoded, factors_of(decoded, weights, SPEC.outer.clip), strict=True):
            total[content[name].indices_s.numpy()] += content[name].values_s.numpy() * np.float32(factor)
        step = np.float32(SPEC.outer.learning_rate) * (total / np.float32(sum(weights)))
        assert np.array_equal(outer.anchor[name].numpy(), anchor - step.reshape(anchor.shape)), name


def test_dense_exchange_of_a_single_replica_takes_over_what_it_learned() -> None:
    replica = Replica(small_spec(outer={"top_k": 0}), 0)
    for _ in range(3):
        replica.train()
        learned = {name: value.clone() for name, value in replica.local.items()}
        replica.outer.commit([(replica.propose(), 1.0)], True, replica.local)
        for name, value in learned.items():
            torch.testing.assert_close(replica.outer.anchor[name], value, rtol=0, atol=1e-7)
            assert not replica.outer.error[name].any()


@pytest.mark.parametrize("codec", [{}, {"top_k": 0}], ids=str)
def test_the_norms_of_a_proposal_are_those_of_its_two_parts(codec: dict[str, Any]) -> None:
    spec = small_spec(outer=codec)
    replica = Replica(spec, 0)
    for _ in range(2):
        replica.train()
        outer = replica.outer
        learned = [outer.anchor[name] - replica.local[name] for name in outer.anchor]
        kept = [spec.outer.error_decay * outer.error[name] for name in outer.anchor]
        payload = replica.propose()
        for parts, norm in ((learned, outer.progress_norm), (kept, outer.error_norm)):
            whole = torch.cat([part.reshape(-1) for part in parts]).double()
            assert norm == pytest.approx(float(whole.norm()), rel=1e-5)
        outer.commit([(payload, 1.0)], True, replica.local)


def test_error_feedback_takes_in_what_neither_top_k_nor_quantization_let_through() -> None:
    replica = Replica(SPEC, 0)
    beta = SPEC.outer.error_decay
    for _ in range(3):
        replica.train()
        outer = replica.outer
        wanted = {
            name: beta * outer.error[name] + (outer.anchor[name] - replica.local[name])
            for name in outer.anchor
        }
        payload = replica.propose()
        outer.commit([(payload, 1.0)], True, replica.local)
        for name, sparse in decode(outer.layout, payload).items():
            sent = torch.zeros(wanted[name].numel())
            sparse.add_to(sent, 1.0)
            torch.testing.assert_close(
                sent.view_as(wanted[name]) + outer.error[name], wanted[name], rtol=0, atol=1e-7
            )


def test_what_clipping_removes_of_a_payload_stays_in_its_error_feedback() -> None:
    replicas = [Replica(SPEC, seed) for seed in range(3)]
    for replica in replicas:
        for name, step in replica.train().items():
            replica.local[name].add_(step, alpha=4.0 if replica is replicas[0] else 0.0)
    payloads = [replica.propose() for replica in replicas]
    outer, local = replicas[0].outer, replicas[0].local
    learned = {name: anchor - local[name] for name, anchor in outer.anchor.items()}
    contents = [decode(outer.layout, payload) for payload in payloads]
    scale = clipping_scales([payload_norm(each) for each in contents], SPEC.outer.clip)[0]
    assert 0.1 < scale < 0.9
    outer.commit([(payload, 1.0) for payload in payloads], True, local)
    for name, sparse in contents[0].items():
        applied = torch.zeros(learned[name].numel())
        sparse.add_to(applied, scale)
        whole = applied.view_as(learned[name]) + outer.error[name]
        torch.testing.assert_close(whole, learned[name], rtol=0, atol=1e-6)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="no peak of memory from a moment on")
def test_a_proposal_takes_one_copy_of_the_stage_and_little_more() -> None:
    """The stage has 28M parameters, 15M of them in one tensor. A process of its own measures the memory.

    Noise only adds to the peak of resident memory, so the least of two measurements counts.
    """
    check = """if True:
        import torch
        from benchmarks.codec import peak_growth, stage_spec
        from node.core.model.shapes import parameter_shapes
        from node.core.optimizer.outer_stage import OuterStage
        from protocol.run_files.resolve import resolve

        def propose(spec):
            local = {name: torch.rand(shape) for name, shape in parameter_shapes(spec, 0).items()}
            stage = OuterStage(spec, 0, {name: torch.zeros(1).expand_as(v) for name, v in local.items()})
            return peak_growth(lambda: stage.propose(local)) / sum(4 * v.numel() for v in local.values())

        torch.set_num_threads(1)
        propose(resolve("nano"))  # loads all code
        print(min(propose(stage_spec(28_000_000, {})) for _ in range(2)))
    """
    # One arena that returns free memory at once: then resident memory is the memory in use.
    allocator = {
        "MALLOC_ARENA_MAX": "1",
        "MALLOC_MMAP_THRESHOLD_": "131072",
        "MALLOC_TRIM_THRESHOLD_": "131072",
    }
    done = subprocess.run(
        [sys.executable, "-c", check],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={**os.environ, **allocator},
    )
    assert 0.9 < float(done.stdout) < 1.2


def test_an_aborted_round_leaves_no_trace() -> None:
    replica = Replica(SPEC, 0)
    replica.train()
    replica.outer.commit([(replica.propose(), 1.0)], True, replica.local)
    replica.train()
    before = replica.snapshot()
    first = replica.propose()
    replica.outer.abort()
    assert_unchanged(replica, before)
    assert replica.propose() == first, "the same contribution is made again"


def test_a_corrupt_payload_leaves_the_round_as_it_was() -> None:
    replica, other = Replica(SPEC, 0), Replica(SPEC, 1)
    replica.train(), other.train()
    mine, theirs = replica.propose(), other.propose()
    before = replica.snapshot()
    with pytest.raises(HetnodeError) as caught:
        replica.outer.commit([(mine, 1.0), (theirs[:-1], 1.0)], True, replica.local)
    assert caught.value.code is ErrorCode.PAYLOAD_CORRUPT
    assert_unchanged(replica, before)
    replica.outer.commit([(mine, 1.0), (theirs, 1.0)], True, replica.local)


def test_finite_payloads_that_overflow_together_never_reach_the_anchor() -> None:
    anchor = {"head": torch.zeros(2)}
    huge = {"head": SparseTensor(None, torch.tensor([3e38, 0.0]))}
    with pytest.raises(HetnodeError) as caught:
        apply_update(anchor, [huge, huge], [1.0, 1.0], OuterSpec())
    assert caught.value.code is ErrorCode.PAYLOAD_CORRUPT
    assert not anchor["head"].any()


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_replica_that_left_the_finite_numbers_has_no_contribution_until_it_is_reset(poison: float) -> None:
    replica = Replica(SPEC, 0)
    replica.train()
    replica.outer.commit([(replica.propose(), 1.0)], True, replica.local)
    replica.local["0.wq"][3, 4] = poison
    before = replica.outer.digest()
    assert replica.outer.propose(replica.local) is None
    assert replica.outer.propose(replica.local) is None, "nothing is pending"
    replica.outer.reset(replica.local)
    assert anchor_digest(replica.local) == replica.outer.digest() == before
    assert not any(error.any() for error in replica.outer.error.values())
    replica.train()
    assert replica.propose()


def test_training_that_went_on_after_the_proposal_is_all_that_local_is_ahead_of_the_new_anchor() -> None:
    replica, payload, _ = started({})
    covered = {name: value.clone() for name, value in replica.local.items()}
    replica.train()
    later = {name: value - covered[name] for name, value in replica.local.items()}
    replica.settle([(payload, 1.0)], True)
    for name, anchor in replica.outer.anchor.items():
        assert torch.equal(replica.local[name], anchor + later[name])


OUTER = {"overlap": 1, "learning_rate": 0.7}


def started(outer: dict[str, Any]) -> tuple[Replica, bytes, dict[str, Tensor]]:
    """A replica in its second round, at the start of the overlapping steps, with what it proposed."""
    replica = Replica(small_spec(outer=OUTER | outer), 0)
    replica.train()
    replica.outer.commit([(replica.propose(), 1.0)], True, replica.local)
    replica.train()
    proposed = {name: value.clone() for name, value in replica.local.items()}
    payload = replica.propose()
    replica.state.keep_training()
    return replica, payload, proposed


@pytest.mark.parametrize("outer", [{}, {"optimizer": "nesterov"}, {"top_k": 0}], ids=str)
def test_eager_steps_start_from_what_a_round_of_the_own_payload_alone_would_commit(
    outer: dict[str, Any],
) -> None:
    replica, payload, _ = started(outer)
    alone = Replica(small_spec(outer=OUTER | outer), 1)
    alone.outer.load(replica.outer.committed, alone.local)
    alone.outer.commit([(payload, 1.0)], False, alone.local)
    assert anchor_digest(replica.local) == anchor_digest(alone.outer.anchor)
    start = {name: value.clone() for name, value in replica.local.items()}
    replica.state.keep_training()
    assert all(torch.equal(replica.local[name], value) for name, value in start.items()), "it starts once"


@pytest.mark.parametrize("end", ["aborted", "left out", "proposed again", "counts"])
def test_after_an_eager_round_local_has_the_progress_and_not_the_estimate(end: str) -> None:
    replica, payload, proposed = started({})
    other = Replica(small_spec(outer=OUTER), 1)
    other.outer.load(replica.outer.committed, other.local)
    other.train()
    theirs = other.propose()
    anchor = dict(replica.outer.anchor)
    later = replica.train()
    if end == "aborted":
        replica.settle([])
    elif end == "proposed again":
        replica.state.begin_round()
        replica.propose()
    else:
        mine = end == "counts"
        replica.settle([(payload, 1.0)] * mine + [(theirs, 1.0)], mine)
    for name, value in replica.local.items():
        ahead = 0.0 if end == "counts" else proposed[name] - anchor[name]
        expected = replica.outer.anchor[name] + ahead + later[name]
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-6)


def test_an_anchor_is_loaded_tensor_by_tensor_without_a_second_copy() -> None:
    replica, other = Replica(SPEC, 0), Replica(SPEC, 1)
    other.train()
    other.outer.commit([(other.propose(), 1.0)], True, other.local)
    former = [weakref.ref(tensor) for tensor in replica.outer.anchor.values()]
    alive = []

    def read(name: str) -> torch.Tensor:
        alive.append(sum(each() is not None for each in former))
        return other.outer.anchor[name].clone()

    shapes = replica.outer.layout.shapes
    elsewhere = {name: RemoteTensor.read_by(shape, partial(read, name)) for name, shape in shapes.items()}
    replica.outer.load(elsewhere, replica.local)
    assert alive == [*range(len(former), 0, -1)]
    assert replica.outer.digest() == anchor_digest(replica.local) == other.outer.digest()


def test_another_anchor_takes_the_place_of_all_that_was_there() -> None:
    replica, other = Replica(SPEC, 0), Replica(SPEC, 1)
    replica.train(), other.train()
    replica.outer.commit([(replica.propose(), 1.0)], True, replica.local)
    other.outer.commit([(other.propose(), 1.0)], True, other.local)
    replica.train()
    replica.propose()
    replica.outer.load(other.outer.anchor, replica.local)
    assert replica.outer.digest() == anchor_digest(replica.local) == other.outer.digest()
    assert not any(error.any() for error in replica.outer.error.values())
    other.outer.anchor["0.wq"].zero_()
    assert replica.outer.anchor["0.wq"].any(), "it is a copy"
    replica.train()
    assert replica.propose(), "the former proposal is forgotten"


@pytest.mark.parametrize("size", [1, CHUNK_BYTES // 4 - 1, CHUNK_BYTES // 4, 2 * CHUNK_BYTES // 4 + 3])
def test_the_digest_is_that_of_the_tensors_bytes_in_chunks_whatever_their_borders(size: int) -> None:
    tensors = {"b": torch.arange(5.0), "a": torch.randn(size), "c": torch.randn(3, 7)}
    stream = b"".join(tensors[name].numpy().tobytes() for name in sorted(tensors))
    chunks = [stream[start : start + CHUNK_BYTES] for start in range(0, len(stream), CHUNK_BYTES)]
    header = header_of({name: tuple(tensor.shape) for name, tensor in tensors.items()})
    hashes = [hashlib.sha256(chunk).digest() for chunk in chunks]
    assert anchor_digest(tensors) == digest_of(header, hashes)


def test_a_proposal_that_was_never_offered_gives_way_to_the_next_one() -> None:
    replica = Replica(SPEC, 0)
    replica.train()
    replica.propose()
    replica.train()
    everything = {name: value.clone() for name, value in replica.local.items()}
    payload = replica.propose()
    replica.outer.commit([(payload, 1.0)], True, replica.local)
    fresh = OuterStage(SPEC, 0, initial_parameters(SPEC, 0))
    assert fresh.propose(everything) == payload


def test_misuse_of_the_transaction_is_caught() -> None:
    replica = Replica(SPEC, 0)
    payload = replica.propose()
    replica.outer.abort()
    with pytest.raises(AssertionError, match="not proposed"):
        replica.outer.commit([(payload, 1.0)], True, replica.local)
    for weights in ([], [0.0], [-1.0], [float("inf")], [float("nan")]):
        with pytest.raises(ValueError, match="positive finite weights"):
            replica.outer.commit([(payload, weight) for weight in weights], False, replica.local)


def test_digests_tell_names_shapes_and_values_apart() -> None:
    value = torch.arange(6.0)
    digests = {
        anchor_digest({"a": value}),
        anchor_digest({"b": value}),
        anchor_digest({"a": value.view(2, 3)}),
        anchor_digest({"a": value + 1e-7}),
        anchor_digest({"a": value, "b": value}),
    }
    assert len(digests) == 5
    assert anchor_digest({"a": value, "b": value + 1}) == anchor_digest({"b": value + 1, "a": value})
    assert anchor_digest({"a": value.view(2, 3).T}) == anchor_digest({"a": value.view(2, 3).T.contiguous()})
    with pytest.raises(ValueError, match="float32"):
        anchor_digest({"a": value.double()})


class NothingIsLost(RuleBasedStateMachine):
    """Whatever the outcome of rounds: sent + error feedback + not yet proposed = everything learned.

    With beta = 1, that is without the decay of the error feedback that the algorithm wants.
    """

    @initialize(codec=st.sampled_from(CODECS), seed=st.integers(0, 2**32))
    def start(self, codec: dict[str, Any], seed: int) -> None:
        spec = small_spec(outer=codec | {"overlap": 1, "error_decay": 1.0, "learning_rate": 0.5})
        # The last stage has no embedding, the fewest parameters, and a tensor shorter than a chunk.
        self.mine, self.other = Replica(spec, seed, stage=3), Replica(spec, seed + 1, stage=3)
        self.learned = {name: torch.zeros_like(value) for name, value in self.mine.local.items()}
        self.sent = {name: torch.zeros_like(value) for name, value in self.mine.local.items()}
        self.pending: bytes | None = None
        self.remembered = False

    @precondition(lambda self: self.pending is None or self.remembered)
    @rule()
    def train(self) -> None:
        for name, step in self.mine.train().items():
            self.learned[name] -= step

    @rule()
    def propose(self) -> None:
        """Also again, where the former proposal was never offered."""
        self.mine.state.begin_round()
        self.pending, self.remembered = self.mine.propose(), False

    @precondition(lambda self: self.pending is not None)
    @rule()
    def go_on_training(self) -> None:
        """Once the proposal is made, and again: what is covered by it stays what it was."""
        self.mine.state.keep_training()
        self.remembered = True

    @rule()
    def abort(self) -> None:
        self.mine.settle([])
        self._end()

    @precondition(lambda self: self.pending is not None)
    @rule(with_other=st.booleans())
    def commit_with_mine(self, with_other: bool) -> None:
        assert self.pending is not None
        payloads = [(self.pending, 1.0)]
        for name, sparse in decode(self.mine.outer.layout, self.pending).items():
            sparse.add_to(self.sent[name].view(-1), 1.0)
        self._commit(payloads, with_other, mine_included=True)

    @rule()
    def commit_without_mine(self) -> None:
        self._commit([], with_other=True, mine_included=False)

    def _commit(self, payloads: list[tuple[bytes, float]], with_other: bool, mine_included: bool) -> None:
        self.other.train()
        payloads = payloads + [(self.other.propose(), 1.0)] * with_other
        self.mine.settle(payloads, mine_included)
        if not with_other:
            self.other.settle([])
        self.other.settle(payloads, with_other)
        self._end()

    def _end(self) -> None:
        self.mine.state.begin_round()
        self.pending, self.remembered = None, False

    # While an estimate stands in for the anchor, local also contains the difference to the proposal.
    @precondition(lambda self: not self.remembered)
    @invariant()
    def everything_learned_is_accounted_for(self) -> None:
        outer = self.mine.outer
        for name, learned in self.learned.items():
            accounted = self.sent[name] + outer.error[name] + (outer.anchor[name] - self.mine.local[name])
            torch.testing.assert_close(accounted, learned, rtol=0, atol=2e-5)

    @invariant()
    def both_replicas_agree(self) -> None:
        assert self.mine.outer.digest() == self.other.outer.digest()


NothingIsLost.TestCase.settings = settings(max_examples=25, stateful_step_count=15)
TestNothingIsLost = NothingIsLost.TestCase


def test_a_stored_payload_is_opened_once_for_the_screen_and_for_the_commit(tmp_path: Path) -> None:
    mine, other, twin = Replica(SPEC, 0), Replica(SPEC, 1), Replica(SPEC, 0)
    for replica in (mine, other, twin):
        replica.train()
    own, foreign = mine.propose(), other.propose()
    twin.propose()
    file = tmp_path / "payload"
    file.write_bytes(foreign)
    stored = [StoredPayload(sha256_of(own)), StoredPayload(sha256_of(foreign), file)]
    assert mine.outer.screen(stored) == ["", ""]
    file.unlink()  # what the screen has decoded is kept
    mine.outer.commit([(each, 1.0) for each in stored], True, mine.local)
    twin.outer.commit([(own, 1.0), (foreign, 1.0)], True, twin.local)
    assert mine.outer.digest() == twin.outer.digest()


@pytest.mark.parametrize("kind", ["another hash", "too long", "no file", "not proposed here"])
def test_a_file_that_is_not_what_was_stored_is_no_fault_of_its_sender(tmp_path: Path, kind: str) -> None:
    replica = Replica(SPEC, 0)
    replica.train()
    payload, file = replica.propose(), tmp_path / "payload"
    replica.outer.abort()
    if kind != "no file":
        file.write_bytes(
            {"another hash": payload[:-1] + b"\0", "too long": payload + b"\0"}.get(kind, payload)
        )
    named = StoredPayload(sha256_of(payload), None if kind == "not proposed here" else file)
    before = replica.snapshot()
    for use in (
        replica.outer.screen,
        lambda each: replica.outer.commit([(each[0], 1.0)], False, replica.local),
    ):
        with pytest.raises(HetnodeError) as lost:
            use([named])
        assert lost.value.code is ErrorCode.PAYLOAD_UNAVAILABLE
    assert_unchanged(replica, before)
