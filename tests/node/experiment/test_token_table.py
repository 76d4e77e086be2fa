"""Token tables at the receiving ends of links, which pipelines train and the shared model does not have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from node.experiment.in_process_replica import LocalReplica
from node.experiment.in_process_swarm import LocalSwarm
from node.experiment.token_table import TokenTable
from node.experiment.variation import Variation
from node.experiment.variation_check import check
from protocol.spec.run import RunSpec
from tests.support.running_replica import spec_of

pytestmark = pytest.mark.usefixtures("one_thread")


def couple(**overrides: Any) -> RunSpec:
    """One full replica and two pipelines of four members."""
    shape = {"swarm.replicas": 1, "swarm.pipelines": 2, "link.k": 8, "rounds": 4, "inner.steps": 3}
    return spec_of(**{**shape, "inner.microbatches": 1, "outer.top_k": 0, **overrides})


def tables(replica: LocalReplica) -> list[Tensor]:
    """The values of all tables, by link and name."""
    return [
        value.detach().clone() for each in replica.link_parameters for _, value in sorted(each.named.items())
    ]


def test_tables_of_uncompressed_links_are_trained_as_stage_embeddings() -> None:
    """The same gradients, gradient norm, learning rate, and no weight decay."""
    alone = {"swarm.replicas": 0, "swarm.pipelines": 1, "link.k": 0, "inner.microbatches": 2}
    ours = LocalSwarm(couple(**alone), variation=Variation(private_tables="private"))
    theirs = LocalSwarm(couple(**alone, **{"model.stage_embeddings": True}))
    ours.train()
    theirs.train()
    expected = theirs.replicas[0]
    for stage, table in enumerate(tables(ours.replicas[0]), start=1):
        embedding = expected.host_of(stage).parameters(stage)[f"emb_{stage}"]
        assert torch.equal(table, embedding)
        assert table.any()
    for stage in range(4):
        mine = ours.replicas[0].host_of(stage).parameters(stage)
        for name, value in mine.items():
            assert torch.equal(value, expected.host_of(stage).parameters(stage)[name]), name


def test_a_table_begins_without_effect_and_is_no_part_of_what_replicas_exchange() -> None:
    usual = LocalSwarm(couple(**{"inner.steps": 1}))
    varied = LocalSwarm(couple(**{"inner.steps": 1}), variation=Variation(private_tables="private"))
    before, after = usual.train_round(), varied.train_round()
    assert [each.loss for each in before.inner] == [each.loss for each in after.inner]
    assert (before.payload_bytes, before.link_bytes) == (after.payload_bytes, after.link_bytes)
    assert [len(replica.link_parameters) for replica in varied.replicas] == [0, 3, 3]
    assert usual.train_round().train_loss != varied.train_round().train_loss


def test_a_pipeline_is_validated_with_its_table_and_no_other_replica_is() -> None:
    swarm = LocalSwarm(couple(), variation=Variation(private_tables="private"))
    before = swarm.validate()
    with torch.no_grad():
        swarm.replicas[1].link_parameters[0].named["left"].normal_()
    after = swarm.validate()
    assert [one == other for one, other in zip(before, after, strict=True)] == [True, False, True]


@pytest.mark.parametrize("rank", [0, 2])
def test_pipelines_share_the_mean_of_their_tables_or_keep_their_own(rank: int) -> None:
    for kind in ("private", "shared"):
        swarm = LocalSwarm(couple(), variation=Variation(private_tables=kind, table_rank=rank))  # type: ignore[arg-type]
        swarm.train()
        trained = [tables(replica) for replica in swarm.replicas[1:]]
        swarm.exchange()
        committed = [tables(replica) for replica in swarm.replicas[1:]]
        for one, other, first, second in zip(*trained, *committed, strict=True):
            assert not torch.equal(one, other)
            if kind == "shared":
                torch.testing.assert_close(first, (one + other) / 2)
                assert torch.equal(first, second)
            else:
                assert torch.equal(first, one)
                assert torch.equal(second, other)


def test_tables_stay_with_links_that_change() -> None:
    swarm = LocalSwarm(couple(), variation=Variation(private_tables="private", basis_every=1))
    swarm.train_round()
    before = tables(swarm.replicas[1])
    swarm.train()
    assert all(not torch.equal(*pair) for pair in zip(before, tables(swarm.replicas[1]), strict=True))


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 4), st.integers(0, 5))
def test_tokens_share_the_rows_of_a_hashed_table_evenly(
    vocabulary: int, buckets: int, rank: int, seed: int
) -> None:
    buckets = min(buckets, vocabulary)
    table = TokenTable(vocabulary, 4, seed, rank, buckets)
    assert not table(torch.arange(vocabulary)).any()
    with torch.no_grad():
        table.left.normal_()
    rows = table(torch.arange(vocabulary).unsqueeze(0))
    assert rows.shape == (1, vocabulary, 4)
    _, counts = rows[0].unique(dim=0, return_counts=True)
    assert len(counts) == buckets
    assert counts.max() - counts.min() <= 1


def test_a_table_of_low_rank_has_that_rank_and_both_factors_learn() -> None:
    swarm = LocalSwarm(couple(), variation=Variation(private_tables="private", table_rank=2))
    before = tables(swarm.replicas[1])
    assert [list(each.shape) for each in before[:2]] == [[256, 2], [2, 32]]
    swarm.train_round()
    after = tables(swarm.replicas[1])
    assert all(not torch.equal(*pair) for pair in zip(before, after, strict=True))
    assert torch.linalg.matrix_rank(after[0] @ after[1]) == 2


def test_a_step_changes_a_table_of_low_rank_as_much_as_a_full_one() -> None:
    norms = []
    for rank in (0, 4):
        torch.manual_seed(0)
        table = TokenTable(16, 64, seed=1, rank=rank)
        with torch.no_grad():
            table.left.copy_(0.01 * torch.randn(table.left.shape).sign())  # a first step of AdamW
        norms.append(table(torch.arange(16)).norm().item())
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"table_rank": 2}, "are for private_tables"),
        ({"table_buckets": 2}, "are for private_tables"),
        ({"private_tables": "private", "replicas_by_round": ((1, 2),)}, "replicas_by_round"),
        ({"private_tables": "private", "uncompressed_pipelines": 1}, "treat all links alike"),
        ({"private_tables": "other"}, "private_tables"),
    ],
)
def test_what_does_not_go_together_is_refused(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ValidationError, match=match):
        Variation(**changes)


@pytest.mark.parametrize(
    ("spec", "changes", "match"),
    [
        ({"swarm.pipelines": 0}, {}, "belong to links"),
        ({"outer.overlap": 1}, {"private_tables": "shared"}, "without overlap"),
        ({}, {"table_rank": 33}, "exceeds model.width 32"),
        ({}, {"table_buckets": 257}, "exceeds model.vocabulary 256"),
    ],
)
def test_what_a_specification_does_not_allow_is_refused(
    spec: dict[str, Any], changes: dict[str, Any], match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        check(couple(**spec), Variation(**{"private_tables": "private", **changes}))
