"""Tables of links that all pipelines of an experiment share, and how tokens share their rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from node.experiment.in_process_replica import LocalReplica
from node.experiment.in_process_swarm import LocalSwarm
from node.experiment.variation import Variation
from node.experiment.variation_check import check
from node.model.link_table import LinkTable
from protocol.spec.run import RunSpec
from tests.support.running_replica import spec_of

pytestmark = pytest.mark.usefixtures("one_thread")


def couple(**overrides: Any) -> RunSpec:
    """One full replica and two pipelines of four members."""
    shape = {"swarm.replicas": 1, "swarm.pipelines": 2, "link.k": 8, "rounds": 4, "inner.steps": 3}
    options = {"inner.microbatches": 1, "outer.top_k": 0, "link.table": True}
    return spec_of(**{**shape, **options, **overrides})


def tables(replica: LocalReplica) -> list[Tensor]:
    """The rows of all tables, by link."""
    values = [member.hosted.table_values for member in replica.members[1:]]
    return [value["rows"].detach().clone() for value in values if value is not None]


@pytest.mark.parametrize("share", [False, True])
def test_pipelines_share_the_mean_of_their_tables_or_keep_their_own(share: bool) -> None:
    swarm = LocalSwarm(couple(), variation=Variation(share_tables=share))
    swarm.train()
    trained = [tables(replica) for replica in swarm.replicas[1:]]
    swarm.exchange()
    after = [tables(replica) for replica in swarm.replicas[1:]]
    for one, other, first, second in zip(*trained, *after, strict=True):
        assert not torch.equal(one, other)
        if share:
            torch.testing.assert_close(first, (one + other) / 2)
            assert torch.equal(first, second)
        else:
            assert torch.equal(first, one)
            assert torch.equal(second, other)


def test_a_pipeline_is_validated_with_its_table_and_no_other_replica_is() -> None:
    swarm = LocalSwarm(couple())
    before = swarm.validate()
    values = swarm.replicas[1].members[1].hosted.table_values
    assert values is not None
    with torch.no_grad():
        values["rows"].normal_()
    after = swarm.validate()
    assert [one == other for one, other in zip(before, after, strict=True)] == [True, False, True]


def test_tables_stay_with_links_that_change() -> None:
    swarm = LocalSwarm(couple(), variation=Variation(basis_every=1))
    swarm.train_round()
    before = tables(swarm.replicas[1])
    assert all(rows.any() for rows in before)
    swarm.replicas[1].connect([4] * 3)
    assert all(torch.equal(*pair) for pair in zip(before, tables(swarm.replicas[1]), strict=True))


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 3))
def test_tokens_share_the_rows_of_a_table_evenly(vocabulary: int, rows: int, boundary: int) -> None:
    rows = min(rows, vocabulary)
    spec = couple(**{"model.vocabulary": 256, "link.table_rows": rows})
    spec = spec.model_copy(update={"model": spec.model.model_copy(update={"vocabulary": vocabulary})})
    table = LinkTable(spec, boundary)
    assert not table(torch.arange(vocabulary)).any()
    with torch.no_grad():
        table.values["rows"].normal_()
    found = table(torch.arange(vocabulary).unsqueeze(0))
    assert found.shape == (1, vocabulary, spec.model.width)
    _, counts = found[0].unique(dim=0, return_counts=True)
    assert len(counts) == rows
    assert counts.max() - counts.min() <= 1


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        ({"swarm.pipelines": 0}, "needs pipelines"),
        ({"link.table": False}, "needs pipelines and link.table"),
        ({"outer.overlap": 1}, "without overlap"),
    ],
)
def test_what_a_specification_does_not_allow_is_refused(spec: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        check(couple(**spec), Variation(share_tables=True))


def test_a_replica_that_returns_begins_without_what_its_tables_had_learned() -> None:
    swarm = LocalSwarm(couple())
    swarm.train_round()
    assert all(rows.any() for rows in tables(swarm.replicas[1]))
    swarm.replicas[1].load_anchor(1)
    assert not any(rows.any() for rows in tables(swarm.replicas[1]))


@pytest.mark.parametrize(
    ("spec", "changes", "match"),
    [
        ({}, {"share_tables": True, "uncompressed_pipelines": 1}, "uncompressed_pipelines"),
        ({}, {"average_gradients": True}, "link.table"),
        ({"link.table": False}, {"average_gradients": True, "trained_ends": True}, "trained_ends"),
        ({"link.table": False, "outer.turns": 2}, {"average_gradients": True}, "turns"),
    ],
)
def test_what_would_give_a_wrong_measurement_is_refused(
    spec: dict[str, Any], changes: dict[str, Any], match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        check(couple(**spec), Variation(**changes))
