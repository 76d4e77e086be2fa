"""Rounds whose outcome is the result of reducers: the same anchors as gathering, and nothing sent twice."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from node.core.model.init import initial_parameters
from node.core.optimizer.embedding_follower import EmbeddingFollower
from node.core.optimizer.outer_stage import OuterStage
from node.reduction.result import ReducedResult
from protocol.errors import ErrorCode, HetnodeError
from protocol.math.outer_step import anchor_digest
from protocol.reduction.partition import PartRange, partition
from protocol.reduction.parts import Reducer, ReductionLayout, cut_payload, join_parts
from protocol.spec.run import RunSpec
from tests.support.reference import small_spec

DENSE = small_spec(outer={"exchange": "reduced", "top_k": 0, "quantizer": "none"})
SPARSE = small_spec(outer={"exchange": "reduced"})


def reduced(spec: RunSpec, outer: OuterStage, payloads: Sequence[bytes]) -> tuple[bytes, list[PartRange]]:
    layout = ReductionLayout(outer.layout.shapes, spec.outer)
    ranges = partition(layout.chunks.total, [2.0, 1.0, 0.0])
    cut = [cut_payload(layout, each, ranges) for each in payloads]
    parts = [
        Reducer(layout, part).reduce([each[number] for each in cut], [1.0] * len(cut))
        for number, part in enumerate(ranges)
    ]
    return join_parts(layout, parts, ranges), ranges


def replicas(spec: RunSpec, count: int = 2) -> tuple[list[OuterStage], list[dict[str, torch.Tensor]]]:
    """Stages 0 with a proposal each, and their parameters."""
    stages, locals_ = [], []
    for seed in range(count):
        generator = torch.Generator().manual_seed(seed)
        local = initial_parameters(spec, 0)
        stages.append(OuterStage(spec, 0, local))
        for value in local.values():
            value.add_(0.01 * torch.randn(value.shape, generator=generator))
        locals_.append(local)
    return stages, locals_


def proposals(stages: list[OuterStage], locals_: list[dict[str, torch.Tensor]]) -> list[bytes]:
    found = [stage.propose(local) for stage, local in zip(stages, locals_, strict=True)]
    return [payload for payload in found if payload is not None]


def test_a_reduced_round_without_loss_commits_what_a_gathered_one_commits() -> None:
    stages, locals_ = replicas(DENSE)
    payloads = proposals(stages, locals_)
    result, _ = reduced(DENSE, stages[0], payloads)
    follower = EmbeddingFollower(DENSE, initial_parameters(DENSE, 0)["emb"])
    follower.commit(ReducedResult(result))
    stages[0].commit(ReducedResult(result), True, locals_[0])
    stages[1].commit([(each, 1.0) for each in payloads], True, locals_[1])
    assert stages[0].digest() == stages[1].digest()
    assert torch.equal(follower.table_vd, stages[1].anchor["emb"])
    assert all(torch.equal(locals_[0][name], value) for name, value in locals_[1].items())


def test_replicas_and_followers_that_apply_a_result_are_equal() -> None:
    stages, locals_ = replicas(SPARSE, 3)
    *payloads, _ = proposals(stages, locals_)
    result, _ = reduced(SPARSE, stages[0], payloads)
    follower = EmbeddingFollower(SPARSE, initial_parameters(SPARSE, 0)["emb"])
    follower.commit(ReducedResult(result))
    for number, (stage, local) in enumerate(zip(stages, locals_, strict=True)):
        stage.commit(ReducedResult(result), number < 2, local)
    assert len({stage.digest() for stage in stages}) == 1
    assert anchor_digest(follower.committed) == anchor_digest({"emb": stages[0].anchor["emb"]})
    assert torch.equal(locals_[0]["emb"], stages[0].anchor["emb"])
    assert not torch.equal(locals_[2]["emb"], stages[2].anchor["emb"])


def test_parts_that_a_reducer_missed_return_to_the_error_feedback() -> None:
    stages, locals_ = replicas(SPARSE)
    payloads = proposals(stages, locals_)
    learned = {name: stages[0].anchor[name] - local for name, local in locals_[0].items()}
    result, ranges = reduced(SPARSE, stages[0], payloads)
    pending = stages[0].pending
    assert pending is not None
    sent_all = dict(pending["error"])
    usual = {name: error.clone() for name, error in sent_all.items()}
    stages[0].commit(ReducedResult(result, (ranges[0],)), True, locals_[0])
    layout = ReductionLayout(stages[0].layout.shapes, SPARSE.outer)
    missed = {piece.tensor: piece for piece in layout.pieces(ranges[0])}
    for name, error in stages[0].error.items():
        stop = missed[name].stop if name in missed else 0
        start = missed[name].start if name in missed else 0
        flat, whole = error.view(-1), learned[name].reshape(-1)
        assert torch.allclose(flat[start:stop], whole[start:stop], atol=1e-6)
        rest = torch.ones(len(flat), dtype=torch.bool)
        rest[start:stop] = False
        assert torch.equal(flat[rest], usual[name].view(-1)[rest])


def test_a_result_that_is_corrupt_changes_nothing() -> None:
    stages, locals_ = replicas(SPARSE)
    result, _ = reduced(SPARSE, stages[0], proposals(stages, locals_))
    before = stages[0].digest()
    with pytest.raises(HetnodeError) as caught:
        stages[0].commit(ReducedResult(result[:-1]), True, locals_[0])
    assert caught.value.code is ErrorCode.PAYLOAD_CORRUPT
    assert stages[0].digest() == before
    assert stages[0].pending is not None
