"""The plans of a run as its history needs them: which replica a payload was made for."""

from __future__ import annotations

from coordinator.state.apply_plans import with_shared_replicas
from coordinator.state.tokens import payload_tokens
from protocol.spec.run import RunSpec
from protocol.types import PayloadDescriptor, PeerId, Plan, Replica

_KEPT = 4
"""Plans whose members can be looked up fast."""


class Planned:
    """All plans so far, and who is in the newest of them."""

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self._plans: list[tuple[Plan, int]] = []
        self._replicas: dict[int, dict[PeerId, Replica]] = {}

    def add(self, plan: Plan, sequence: int) -> None:
        former = self._plans[-1][0] if self._plans else None
        self._plans.append((with_shared_replicas(plan, former), sequence))

    @property
    def count(self) -> int:
        return len(self._plans)

    def of_round(self, round_number: int) -> tuple[Plan, int]:
        """The plan under which `round_number` runs, and the sequence of its event."""
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
        # Payloads in logs of version 2 name no plan.
        if descriptor.epoch:
            plan, _ = self._plans[descriptor.epoch - 1]
        else:
            plan, _ = self.of_round(descriptor.round_number)
        replica = self.replica_of(plan, descriptor.owner)
        return payload_tokens(self._spec, replica, descriptor.weight) if replica else 0
