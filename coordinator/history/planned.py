"""The plans of a run as its history needs them: which replica a payload was made for."""

from __future__ import annotations

from typing import TypeAlias

from coordinator.state.apply_plans import with_shared_replicas
from coordinator.state.state import KEPT_DECISIONS
from coordinator.state.tokens import payload_tokens
from protocol.spec.run import RunSpec
from protocol.types import PayloadDescriptor, PeerId, Plan, Replica

_KEPT = 4
"""Plans whose members can be looked up fast."""


PlansKept: TypeAlias = tuple[tuple[Plan, int], ...]
"""Plans and the sequences of their events."""


class Planned:
    """The plans of the newest rounds, and who is in them. It is asked about rounds whose events come in."""

    def __init__(self, spec: RunSpec, plans: PlansKept = ()) -> None:
        self._spec = spec
        self._plans = list(plans)
        self._replicas: dict[int, dict[PeerId, Replica]] = {}

    @property
    def plans(self) -> PlansKept:
        """Those that are kept."""
        return tuple(self._plans)

    def add(self, plan: Plan, sequence: int) -> None:
        former = self._plans[-1][0] if self._plans else None
        self._plans.append((with_shared_replicas(plan, former), sequence))
        # Its first round is the current one or the next.
        while len(self._plans) > 1 and self._plans[1][0].from_round <= plan.from_round - KEPT_DECISIONS:
            del self._plans[0]

    def of_round(self, round_number: int) -> tuple[Plan, int]:
        """The plan under which `round_number` runs, and the sequence of its event; the first that is kept for
        earlier rounds."""
        later_first = reversed(self._plans)
        return next((each for each in later_first if each[0].from_round <= round_number), self._plans[0])

    def replica_of(self, plan: Plan, peer: PeerId) -> Replica | None:
        replicas = self._replicas.get(plan.epoch)
        if replicas is None:
            replicas = {member.peer: each for each in plan.replicas for member in each.members}
            self._replicas[plan.epoch] = replicas
            while len(self._replicas) > _KEPT:
                del self._replicas[next(iter(self._replicas))]
        return replicas.get(peer)

    def tokens_of(self, descriptor: PayloadDescriptor) -> int:
        """The tokens that a payload stands for; 0 if the plan that it names does not include its owner."""
        # Payloads in logs of version 2 name no plan, and a payload may name one that is not kept any more.
        named = (plan for plan, _ in self._plans if plan.epoch == descriptor.epoch)
        plan = next(named, None) or self.of_round(descriptor.round_number)[0]
        replica = self.replica_of(plan, descriptor.owner)
        return payload_tokens(self._spec, replica, descriptor) if replica else 0
