"""The state keeps the plans of the last rounds; older ones are in the log."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.run.state.apply import replay
from coordinator.run.state.events import PlanAdopted
from coordinator.run.state.state import KEPT_DECISIONS, State
from coordinator.run.state.tokens import payload_tokens, worths
from protocol.types import Committed, ManifestEntry
from tests.support.coordinator_run import Run, started
from tests.support.timed_rounds import A, usual_rounds

ROUNDS = 2 * KEPT_DECISIONS
ASKED = 5


def adopt(run: Run) -> None:
    """A new plan from the current round on, like the one before it."""
    newest = run.state.plans[-1]
    plan = replace(newest, epoch=newest.epoch + 1, from_round=run.state.current_round)
    run.apply(PlanAdopted(run.now, plan))


@pytest.fixture(scope="module")
def run() -> Run:
    """A run whose plan changes in each round from round 5 on."""
    run = started(3, rounds=ROUNDS + 5)
    usual_rounds(run, ASKED - 1)
    while run.state.current_round <= ROUNDS:
        adopt(run)
        usual_rounds(run, 1)
    return run


def test_memory_is_bounded_and_the_plans_of_the_last_rounds_are_known(run: Run) -> None:
    state, adopted = run.state, [each.plan for each in run.events if isinstance(each, PlanAdopted)]
    assert state.epoch == len(adopted) == ROUNDS - ASKED + 2
    assert len(state.plans) <= KEPT_DECISIONS + 2
    assert state.plan_of(1) is state.plan_of(0) is state.plan_of(state.epoch + 1) is None
    for number in range(ROUNDS - KEPT_DECISIONS, ROUNDS + 1):
        plan = state.plan_for(number)
        assert plan.from_round == number
        assert plan == adopted[plan.epoch - 1] == state.plan_of(plan.epoch)
    assert replay(State(run.spec, state.run), run.events) == state


def test_a_payload_that_names_a_plan_that_is_not_kept_counts_by_the_plan_of_its_round(run: Run) -> None:
    of_last = payload_tokens(run.spec, run.state.plans[-1].replicas[0], A.payload(run.spec, 0, ROUNDS))
    payloads = [A.payload(run.spec, 0, ROUNDS, epoch=epoch) for epoch in (0, 1, run.state.epoch)]
    entries = tuple(ManifestEntry(each, (A.peer,)) for each in payloads)
    decision = Committed(0, ROUNDS, 0, "r", entries)
    assert [tokens for _, tokens in worths(run.state, decision)] == 3 * [of_last]
