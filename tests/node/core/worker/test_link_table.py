"""The token table of a link: trained behind it, private to the replica, kept in private checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from node.core.model.link_table import LINK_TABLE, LinkTable
from node.core.model.shapes import parameter_shapes
from node.core.worker.compute import Compute
from node.core.worker.trainer import Trainer
from node.data.stream import open_stream
from node.experiment.in_process_replica import LocalReplica
from protocol.spec.run import RunSpec
from protocol.types import Part, StageRange
from tests.support.running_replica import replica_of, spec_of, with_k

pytestmark = pytest.mark.usefixtures("one_thread")

TABLE = {"link.table": True, "swarm.stages": 2, "inner.microbatches": 2, "inner.steps": 2}
BEHIND = StageRange(1, 2)


def pipeline(spec: RunSpec, k: int | None = None) -> LocalReplica:
    replica = replica_of(spec, 2)
    return LocalReplica(spec, replica if k is None else with_k(replica, k), Compute(), open_stream(spec))


def train(replica: LocalReplica, spec: RunSpec, round_number: int = 1) -> None:
    size = spec.samples_per_round()
    replica.begin_round(round_number, range((round_number - 1) * size, round_number * size))
    replica.train(range(spec.inner.steps))


def settle(replica: LocalReplica, round_number: int) -> None:
    replica.end_inner_phase()
    payloads = replica.propose(range(2))
    replica.settle(round_number, [([(payloads[stage], 1.0)], True) for stage in sorted(payloads)])


def values_of(trainer: Trainer) -> dict[str, Tensor]:
    values = trainer.hosted.table_values
    assert values is not None
    return {name: value.detach().clone() for name, value in values.items()}


def test_only_members_behind_a_link_have_one_and_it_begins_at_zero() -> None:
    first, second = pipeline(spec_of(**TABLE)).members
    assert first.hosted.table is None
    assert not values_of(second)["rows"].any()
    assert pipeline(spec_of(**{**TABLE, "link.table": False})).members[1].hosted.table is None


def test_a_link_that_compresses_gets_it_back_and_an_uncompressed_one_does_not() -> None:
    losses = {}
    for k in (4, 0):
        replica = pipeline(spec_of(**TABLE), k)
        before = replica.validate()
        with torch.no_grad():
            values = replica.members[1].hosted.table_values
            assert values is not None
            values["rows"].normal_()
        losses[k] = before, replica.validate()
    assert losses[4][0] != pytest.approx(losses[4][1], rel=1e-3)
    assert losses[0][0] == losses[0][1]


def test_payloads_and_anchors_know_nothing_of_it() -> None:
    with_table, without = spec_of(**TABLE), spec_of(**{**TABLE, "link.table": False})
    assert parameter_shapes(with_table, 1) == parameter_shapes(without, 1)
    replica, plain = pipeline(with_table), pipeline(without)
    train(replica, with_table)
    train(plain, without)
    assert [len(each) for each in replica.propose(range(2)).values()] == [
        len(each) for each in plain.propose(range(2)).values()
    ]


@pytest.mark.parametrize("options", [{}, {"link.table_rows": 9}], ids=["all", "shared"])
def test_a_member_that_continues_from_its_checkpoint_has_the_same_bits(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    spec = spec_of(**TABLE, **options)
    running, other = pipeline(spec), pipeline(spec)
    train(running, spec)
    settle(running, 1)
    assert values_of(running.members[1])["rows"].any()
    for position, (mine, its) in enumerate(zip(other.members, running.members, strict=True)):
        its.write_checkpoint(tmp_path / f"{position}" / "round-000001", 1)
        assert mine.restore(tmp_path / f"{position}") is not None
    for replica in (running, other):
        train(replica, spec, 2)
    found, expected = values_of(other.members[1]), values_of(running.members[1])
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    for replica in (running, other):
        settle(replica, 2)
    assert other.members[1].outer[1].digest() == running.members[1].outer[1].digest()


def test_a_table_of_another_link_is_not_taken_over(tmp_path: Path) -> None:
    spec = spec_of(**{**TABLE, "swarm.stages": 4})
    trained, other = Trainer(spec, StageRange(1, 3)), Trainer(spec, StageRange(2, 3))
    with torch.no_grad():
        values = trained.hosted.table_values
        assert values is not None
        values["rows"].fill_(1.0)
    trained.write_checkpoint(tmp_path / "round-000000", 0)
    restored = other.restore(tmp_path)
    assert restored is not None
    assert restored.private is not None
    assert not values_of(other)["rows"].any()


def test_records_of_checkpoints_without_tables_are_those_from_before_there_were_any(tmp_path: Path) -> None:
    for options, expected in ((TABLE, True), ({**TABLE, "link.table": False}, False)):
        folder = tmp_path / str(expected) / "round-000000"
        Trainer(spec_of(**options), BEHIND).write_checkpoint(folder, 0)
        (entry,) = json.loads((folder / "private" / "private.json").read_text())["stages"].values()
        assert ("table" in entry) is expected


def test_one_that_is_not_finite_begins_anew() -> None:
    spec = spec_of(**TABLE)
    replica = pipeline(spec)
    train(replica, spec)
    with torch.no_grad():
        values = replica.members[1].hosted.table_values
        assert values is not None
        values["rows"].fill_(torch.nan)
    train(replica, spec, 2)
    assert replica.end_inner_phase().skipped_steps == spec.inner.steps
    assert not values_of(replica.members[1])["rows"].any()
    train(replica, spec, 3)
    assert replica.end_inner_phase().skipped_steps == 0


def test_back_at_the_initial_parameters_it_is_zero() -> None:
    spec = spec_of(**TABLE)
    replica = pipeline(spec)
    train(replica, spec)
    member = replica.members[1]
    member.load_initial()
    assert not values_of(member)["rows"].any()
    assert member.inner.state_dict()[LINK_TABLE] is None


def test_who_loads_an_anchor_of_others_begins_with_zeros() -> None:
    """As after a rollback: what undone rounds have trained must not stay."""
    spec = spec_of(**TABLE)
    replica = pipeline(spec)
    behind = replica.members[1]
    train(replica, spec)
    settle(replica, 1)
    assert values_of(behind)["rows"].any()
    behind.load_initial_part(1, Part.STAGE, 2)
    assert not values_of(behind)["rows"].any()
    assert behind.inner.state_dict()[LINK_TABLE] == pipeline(spec).members[1].inner.state_dict()[LINK_TABLE]


def test_tokens_that_share_a_row_are_the_same_in_every_version() -> None:
    assignment = LinkTable(spec_of(**TABLE, **{"link.table_rows": 5}), 1).get_buffer("_row_of_v").tolist()
    assert assignment[:12] == [2, 4, 4, 3, 3, 0, 0, 4, 4, 4, 3, 2]
    counts = [assignment.count(row) for row in range(5)]
    assert max(counts) - min(counts) <= 1
