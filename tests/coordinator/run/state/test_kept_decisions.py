"""The state keeps the decisions of the last rounds; what it says of older rounds stays the same."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.run.state.apply import replay
from coordinator.run.state.commands import Attest, Await, Offer, Report
from coordinator.run.state.events import Event, PlanAdopted
from coordinator.run.state.state import KEPT_DECISIONS, State
from coordinator.run.state.tokens import payload_tokens
from coordinator.store.decision_log import DecisionLog
from coordinator.store.restore import restore
from coordinator.store.store import SqliteStore
from protocol.types import Committed, Decision, Part
from tests.builders import anchor_of, decisions_in, keyed
from tests.support.coordinator_run import Run, play_rounds, started_and_attested
from tests.support.history import stored

ROUNDS = KEPT_DECISIONS + 8
A = keyed(0)


@pytest.fixture(scope="module")
def run() -> Run:
    run = started_and_attested(2, rounds=ROUNDS + 5)
    play_rounds(run, ROUNDS)
    return run


def decisions_of(run: Run) -> dict[tuple[int, int], Decision]:
    committed = decisions_in(run.events, Committed)
    return {(each.stage, each.round_number): each for each in committed}


def test_memory_is_bounded_and_counters_go_on(run: Run) -> None:
    state, stages = run.state, run.state.stages
    assert len(state.decisions) == KEPT_DECISIONS * stages
    assert state.decided == state.committed == ROUNDS * stages
    assert state.aborted == 0
    for number in range(ROUNDS + 3):
        assert state.is_decided(0, number) == (1 <= number <= ROUNDS)
    assert not state.is_decided(-1, 1)
    assert not state.is_decided(stages, 1)
    replica = state.plans[-1].replicas[0]
    payload = A.payload(run.spec, 0, 1, weight=replica.weight)
    of_round = 2 * payload_tokens(run.spec, replica, payload)
    assert state.tokens == ROUNDS * of_round
    assert all(state.keeps_digests(number) for number in state.tokens_at)
    assert all(state.tokens_at[number] == number * of_round for number in state.tokens_at)
    assert {number for _, number, _ in state.digests} - {0} <= state.tokens_at.keys()


def test_commands_about_rounds_that_are_not_kept_change_nothing(run: Run) -> None:
    before = run.state
    payload = A.payload(run.spec, 0, 1)
    for command in (
        Offer(A.peer, payload),
        Report(A.peer, 0, 1, (payload,)),
        Await(A.peer, 0, 1),
        Attest(A.peer, 0, 1, Part.STAGE, anchor_of(0, 1)),
    ):
        assert not run.accept(command), command
    assert run.state is before


async def test_the_log_has_every_decision_also_after_a_start(run: Run, tmp_path: Path) -> None:
    log = stored(run.events)
    with closing(SqliteStore(tmp_path / "log.sqlite", A.peer, A.sign)) as store:
        found = DecisionLog(store)
        store.begin(run.spec.canonical_json)
        store.append(log)
        seen: list[Event] = []
        state = restore(store, run.spec, run.spec.name, (lambda event, *_: seen.append(event),))
        assert state == replay(State(run.spec, run.spec.name), log)
        assert seen == log
        for (stage, number), decision in decisions_of(run).items():
            assert await found.of(stage, number) == decision
        for unknown in ((0, 0), (0, ROUNDS + 1), (run.state.stages, 1), (-1, 2)):
            with pytest.raises(KeyError):
                await found.of(*unknown)


def test_plans_share_the_replicas_that_stay(run: Run) -> None:
    newest = run.state.plans[-1]
    read = tuple(replace(each) for each in newest.replicas)  # as from the log: equal, and others
    changed = replace(read[1], microbatches=3, members=tuple(replace(each) for each in read[1].members))
    plan = replace(newest, epoch=newest.epoch + 1, from_round=ROUNDS + 2, replicas=(read[0], changed))
    state = replay(run.state, [PlanAdopted(run.now, plan)])
    assert state.plans[-1] == plan
    first, second = state.plans[-1].replicas
    assert first is newest.replicas[0]
    assert second.members[0] is newest.replicas[1].members[0]
