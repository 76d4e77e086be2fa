"""A run of the coordinator in which every event is checked, and the invariants that hold after every step."""

from __future__ import annotations

from hypothesis.stateful import RuleBasedStateMachine, invariant

from coordinator.run.state.events import Event, PlanAdopted
from coordinator.run.state.state import KEPT_DECISIONS
from protocol.spec.run import RunSpec
from protocol.types import Decision
from tests.builders import decisions_in, keyed
from tests.support.coordinator_run import Run
from tests.support.invariants import Invariants

STAGES = 2
ARBITER = keyed(99)


class CheckedRun(Run):
    """A run in which every single event is checked against the state that it changes."""

    def __init__(self, spec: RunSpec) -> None:
        super().__init__(spec)
        self.invariants = Invariants(spec)

    def apply(self, event: Event) -> None:
        before = self.state
        super().apply(event)
        self.invariants.check_event(before, event, self.state)


class CheckedMachine(RuleBasedStateMachine):
    """The invariants of any run. A test adds the rules by which peers act.

    Attributes:
        decisions: those that were checked, by (stage, round).
    """

    run: CheckedRun
    decisions: dict[tuple[int, int], Decision]

    @invariant()
    def the_invariants_of_every_run_hold(self) -> None:
        self.run.invariants.check_state(self.run.state)

    @invariant()
    def decisions_are_single_and_final(self) -> None:
        """The whole list, which the checks above do not read again."""
        found = decisions_in(self.run.events)
        by_key = {(decision.stage, decision.round_number): decision for decision in found}
        assert len(by_key) == len(found)
        state = self.run.state
        assert len(by_key) == state.decided
        assert all(state.is_decided(*key) for key in by_key)
        assert all(by_key[key] == decision for key, decision in state.decisions.items())
        oldest = state.current_round - KEPT_DECISIONS
        assert {key for key in by_key if key[1] >= oldest} <= state.decisions.keys()
        assert all(by_key[key] == decision for key, decision in self.decisions.items())
        self.decisions = by_key

    @invariant()
    def plans_are_kept(self) -> None:
        state, adopted = self.run.state, [e.plan for e in self.run.events if isinstance(e, PlanAdopted)]
        assert [plan.epoch for plan in adopted] == [*range(1, state.epoch + 1)]
        assert state.plans == tuple(adopted[len(adopted) - len(state.plans) :])
        for number in range(max(1, state.current_round - KEPT_DECISIONS), state.current_round + 2):
            runs = [plan for plan in adopted if plan.from_round <= number] or adopted[:1]
            assert not adopted or state.plan_for(number) == state.plan_of(runs[-1].epoch) == runs[-1]
