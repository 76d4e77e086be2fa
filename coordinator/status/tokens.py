"""How many tokens the run has trained, from its decisions: exact under restarts and churn."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from coordinator.state.state import State
from protocol.spec.run import RunSpec
from protocol.types import Decision, PeerId, Replica


def payload_tokens(spec: RunSpec, replica: Replica, weight: float) -> int:
    """The tokens that a payload of this weight stands for, by a member of `replica`."""
    # A replica that did a part of its inner phase has that part of its weight.
    samples = spec.samples_per_round(spec.microbatches_of(replica))
    return round(weight / replica.weight * samples * spec.model.context)


class CommittedTokens:
    """The tokens whose training is committed: those of the payloads in the decisions of stage 0.

    Decisions never change, so each is read once. One object serves one run.

    Args:
        state: its decisions are read now: for those of a long run that takes seconds.

    Attributes:
        newest: the tokens as they were counted last; another thread may read it.
    """

    def __init__(self, state: State | None = None) -> None:
        self._round, self.newest = 0, 0
        self._epoch, self._replicas = 0, dict[PeerId, Replica]()  # of the plan that was looked up last
        if state is not None:
            self.of(state)

    def of(self, state: State) -> int:
        """The tokens up to the newest decision of stage 0."""
        while (decision := state.decisions.get((0, self._round + 1))) is not None:
            self._round += 1
            self.newest += self._of_decision(state, decision)
        return self.newest

    def _of_decision(self, state: State, decision: Decision) -> int:
        tokens = 0
        for descriptor in (entry.descriptor for entry in decision.entries):
            # Payloads in logs of version 2 name no plan.
            plan = state.plans[descriptor.epoch - 1] if descriptor.epoch else state.plan_for(self._round)
            if plan.epoch != self._epoch:
                self._epoch = plan.epoch
                self._replicas = {member.peer: each for each in plan.replicas for member in each.members}
            if (replica := self._replicas.get(descriptor.owner)) is not None:
                tokens += payload_tokens(state.spec, replica, descriptor.weight)
        return tokens


def tokens_after(state: State, rounds: Iterable[int]) -> dict[int, int]:
    """For each of `rounds`, the tokens that later rounds have committed. Reads all decisions."""
    counter, totals = CommittedTokens(), dict[int, int]()
    newest = counter.of(state)
    for round_number in rounds:
        totals[round_number] = newest - CommittedTokens().of(_until(state, round_number))
    return totals


def _until(state: State, round_number: int) -> State:
    """`state` with the decisions up to `round_number`."""
    return replace(state, decisions=state.decisions.keep(lambda key, _: key[1] <= round_number))
