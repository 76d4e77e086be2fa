"""What a round counts: steps beyond H, late proposals, aborted rounds, and the order of rounds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from node.core.worker.trainer import Trainer
from node.data.stream import SampleStream
from tests.support.hand_driven_replica import (
    SPEC,
    assert_same_bits,
    chain,
    commit,
    inner_phase,
    inner_step,
    proposals,
    state,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def test_steps_beyond_h_survive_the_commit_of_their_round(stream: SampleStream) -> None:
    (member,) = chain(stream, 1)
    inner_phase([member], 1)
    payloads = {stage: [payload] for stage, payload in proposals([member]).items()}
    member.outer.keep_training()
    start = state([member])
    for step in (SPEC.inner.steps + 1, SPEC.inner.steps + 2):
        inner_step([member], step)
    learned = {n: v - start[n] for n, v in state([member]).items() if n.startswith("local")}
    assert any(value.any() for value in learned.values())
    result = member.end_inner_phase()
    assert result.steps == SPEC.inner.steps  # steps beyond H do not belong to the round
    assert result.tokens == result.steps * SPEC.samples_per_round() // SPEC.inner.steps * SPEC.model.context
    commit([member], 1, payloads, True)
    after = state([member])
    for name, value in learned.items():
        assert torch.equal(after[name], after[name.replace("local", "anchor")] + value)


def test_a_stage_that_proposes_only_after_training_went_on_loses_nothing(stream: SampleStream) -> None:
    """The coordinator becomes unreachable between the proposals of two stages."""
    (member,) = chain(stream, 1)
    inner_phase([member], 1)
    payloads = {0: [member.outer.propose(0) or b""]}
    member.outer.keep_training()
    start = learned_by(member, 0)
    inner_step([member], SPEC.inner.steps + 1)
    payloads[1] = [member.outer.propose(1) or b""]
    start |= learned_by(member, 1)
    inner_step([member], SPEC.inner.steps + 2)
    since = {
        name: value - start[name] for name, value in (learned_by(member, 0) | learned_by(member, 1)).items()
    }
    assert all(any(value.any() for name, value in since.items() if name[0] == stage) for stage in (0, 1))
    commit([member], 1, payloads, True)
    for (stage, name), value in since.items():
        local = learned_by(member, stage)[stage, name]
        assert torch.equal(local, member.outer[stage].anchor[name] + value)


def learned_by(member: Trainer, stage: int) -> dict[tuple[int, str], Tensor]:
    """The local parameters of a stage."""
    found = member.modules[stage].canonical_parameters()
    return {(stage, name): parameter.detach().clone() for name, parameter in found.items()}


def test_the_round_after_steps_beyond_h_ends_on_the_anchor(stream: SampleStream) -> None:
    (member,) = chain(stream, 1)
    for round_number in (1, 2):
        inner_phase([member], round_number)
        payloads = {stage: [payload] for stage, payload in proposals([member]).items()}
        if round_number == 1:
            member.outer.keep_training()
            inner_step([member], SPEC.inner.steps + 1)
        commit([member], round_number, payloads, True)
    for name, value in state([member]).items():
        if name.startswith("local"):
            assert torch.equal(value, state([member])[name.replace("local", "anchor")])


def test_a_member_that_finds_its_own_payload_in_the_log_does_not_apply_it_twice(stream: SampleStream) -> None:
    """A node that was restarted has no record that it sent this payload."""
    (member,) = chain(stream, 1)
    inner_phase([member], 1)
    payloads = {stage: [payload] for stage, payload in proposals([member]).items()}
    commit([member], 1, payloads, False)
    for stage in member.stages:
        member.outer.forget_error(stage)
    for name, value in state([member]).items():
        if name.startswith("local"):
            assert torch.equal(value, state([member])[name.replace("local", "anchor")])


def test_an_aborted_round_moves_no_anchor_but_is_counted(stream: SampleStream) -> None:
    members = chain(stream, 2)
    before = state(members)
    for member in members:
        for stage in member.stages:
            member.outer.abort(stage, 1)
    digest = members[1].outer.embedding_digest()
    assert members[1].commit_embedding(1, []) == digest
    assert_same_bits(state(members), before)
    assert [member.outer.rounds for member in members] == [{0: 1}, {1: 1}]
    assert [member.outer.embedding_round for member in members] == [1, 1]


def test_rounds_are_applied_in_their_order(stream: SampleStream) -> None:
    members = chain(stream, 2)
    inner_phase(members, 1)
    sent = proposals(members)
    with pytest.raises(AssertionError, match="after round 0"):
        members[0].commit(0, 2, [(sent[0], 1.0)], True)
    members[0].commit(0, 1, [(sent[0], 1.0)], True)
    with pytest.raises(AssertionError, match="after round 1"):
        members[0].commit(0, 1, [(sent[0], 1.0)], False)
    with pytest.raises(AssertionError, match="after round 0"):
        members[1].commit_embedding(2, [(sent[0], 1.0)])
