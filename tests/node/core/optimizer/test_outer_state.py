"""Outer state with a momentum: committed like the anchor, and part of digests and recovery."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from node.core.model.init import initial_parameters
from node.core.optimizer.outer_state import OuterState, embedding_of
from protocol.codec.payload import decode
from protocol.errors import ErrorCode, HetnodeError
from protocol.math.outer_step import anchor_digest
from protocol.spec.run import RunSpec
from tests.support.reference import small_spec

NESTEROV = small_spec(outer={"optimizer": "nesterov"})
LAST = 3


class Member:
    """A member that hosts `stages`; :meth:`train` changes its parameters at random."""

    def __init__(self, stages: tuple[int, ...], seed: int = 0, spec: RunSpec = NESTEROV) -> None:
        self.local = {stage: initial_parameters(spec, stage) for stage in stages}
        embedding = None if 0 in stages else initial_parameters(spec, 0)["emb"]
        self.outer = OuterState(spec, self.local, embedding)
        self._generator = torch.Generator().manual_seed(seed)

    def train(self) -> None:
        for tensors in self.local.values():
            for tensor in tensors.values():
                tensor.add_(0.01 * torch.randn(tensor.shape, generator=self._generator))

    def propose(self, stage: int) -> bytes:
        payload = self.outer.propose(stage)
        assert payload is not None
        return payload


def state_of(member: Member, stage: int) -> Any:
    outer = member.outer[stage]
    return {"committed": outer.committed, "error": outer.error, "pending": outer.pending}


def tensors_of(state: Any) -> list[Tensor]:
    if isinstance(state, Tensor):
        return [state.clone()]
    return [each for value in state.values() for each in tensors_of(value)] if isinstance(state, dict) else []


def assert_equal(one: Any, other: Any) -> None:
    pairs = zip(tensors_of(one), tensors_of(other), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_replicas_and_followers_hold_the_same_momentum_after_every_round() -> None:
    replicas, follower = [Member((0,), seed) for seed in range(3)], Member((1,))
    for round_number in range(1, 5):
        payloads = []
        for replica in replicas:
            replica.train()
            payloads.append((replica.propose(0), 1.0))
        counted = payloads[:2] if round_number == 3 else payloads
        digests = {
            replica.outer.commit(0, round_number, counted, index < len(counted))
            for index, replica in enumerate(replicas)
        }
        assert len(digests) == 1
        followed = follower.outer.commit_embedding(round_number, counted)
        assert {replica.outer.embedding_digest() for replica in replicas} == {followed}
        assert follower.outer.follower is not None
        assert_equal(follower.outer.follower.committed, embedding_of(replicas[0].outer[0].committed))
        assert replicas[0].outer[0].optimizer_state["emb/momentum"].any()


def test_the_anchor_moves_as_torchs_nesterov_along_the_mean_of_what_is_sent() -> None:
    replicas = [Member((LAST,), seed) for seed in range(2)]
    name = "head"
    theirs = torch.nn.Parameter(replicas[0].outer[LAST].anchor[name].double())
    optimizer = torch.optim.SGD([theirs], lr=0.7, momentum=0.9, nesterov=True)
    for round_number in range(1, 6):
        payloads = []
        for replica in replicas:
            replica.train()
            payloads.append((replica.propose(LAST), 1.0))
        total = torch.zeros(theirs.numel(), dtype=torch.float64)
        for payload, _ in payloads:
            decode(replicas[0].outer[LAST].layout, payload)[name].add_to(total, 0.5)
        theirs.grad = total.view_as(theirs)
        optimizer.step()
        for replica in replicas:
            replica.outer.commit(LAST, round_number, payloads, True)
        found = replicas[0].outer[LAST].anchor[name].double()
        torch.testing.assert_close(found, theirs.detach(), rtol=0, atol=1e-6)


def test_the_digest_covers_the_momentum_and_without_one_is_that_of_the_anchor() -> None:
    member, usual = Member((0,)), Member((0,), spec=small_spec())
    assert usual.outer[0].digest() == anchor_digest(usual.outer[0].anchor)
    before = member.outer[0].digest()
    assert before != usual.outer[0].digest()
    outer = member.outer[0]
    outer.take(outer.anchor | {name: tensor + 1 for name, tensor in outer.optimizer_state.items()})
    assert member.outer[0].digest() != before


def test_payloads_that_overflow_the_momentum_change_nothing() -> None:
    spec = small_spec(outer={"optimizer": "nesterov", "top_k": 0, "quantizer": "none", "momentum": 0.9})
    member, donor = Member((LAST,), spec=spec), Member((LAST,), 1, spec=spec)
    for tensor in donor.local[LAST].values():
        tensor.fill_(-1.5e38)
    payload = donor.propose(LAST)
    member.outer.commit(LAST, 1, [(payload, 1.0)], False)
    before = tensors_of(state_of(member, LAST))
    with pytest.raises(HetnodeError) as caught:
        member.outer.commit(LAST, 2, [(payload, 1.0)], False)
    assert caught.value.code is ErrorCode.PAYLOAD_CORRUPT
    assert_equal(dict(enumerate(before)), state_of(member, LAST))
