"""How many tokens the run has trained, from its decisions: exact under restarts and churn."""

from __future__ import annotations

from coordinator.state.state import State
from protocol.types import Decision, PeerId, Replica


class CommittedTokens:
    """The tokens whose training is committed: those of the payloads in the decisions of stage 0.

    Decisions never change, so each is read once. One object serves one run.
    """

    def __init__(self) -> None:
        self._round, self._tokens = 0, 0
        self._epoch, self._replicas = 0, dict[PeerId, Replica]()  # of the plan that was looked up last

    def of(self, state: State) -> int:
        """The tokens up to the newest decision of stage 0."""
        while (decision := state.decisions.get((0, self._round + 1))) is not None:
            self._round += 1
            self._tokens += self._of_decision(state, decision)
        return self._tokens

    def _of_decision(self, state: State, decision: Decision) -> int:
        spec, tokens = state.spec, 0
        for descriptor in (entry.descriptor for entry in decision.entries):
            # Payloads in logs of version 2 name no plan.
            plan = state.plans[descriptor.epoch - 1] if descriptor.epoch else state.plan_for(self._round)
            if plan.epoch != self._epoch:
                self._epoch = plan.epoch
                self._replicas = {member.peer: each for each in plan.replicas for member in each.members}
            if (replica := self._replicas.get(descriptor.owner)) is not None:
                # A replica that did a part of its inner phase has that part of its weight.
                samples = spec.samples_per_round(spec.microbatches_of(replica))
                tokens += round(descriptor.weight / replica.weight * samples * spec.model.context)
        return tokens
