"""How many tokens a run has trained, from its decisions: exact under restarts and churn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.algorithm.turns import rounds_behind
from protocol.spec.run import RunSpec
from protocol.types import Decision, PayloadDescriptor, PeerId, Replica

if TYPE_CHECKING:
    from coordinator.state.state import State


def payload_tokens(spec: RunSpec, replica: Replica, payload: PayloadDescriptor) -> int:
    """The tokens that a payload stands for, by a member of `replica`.

    Where stages exchange in turn, all rounds since the last turn count like that of the payload.
    """
    # A replica that did a part of its inner phase has that part of its weight.
    samples = spec.samples_per_round(spec.microbatches_of(replica))
    rounds = rounds_behind(spec, payload.stage, payload.round_number)
    return round(payload.weight / replica.weight * samples * spec.model.context * rounds)


def decided_tokens(state: State, decision: Decision) -> int:
    """The tokens whose training `decision` commits. Stage 0 counts for all stages, the others give 0."""
    if decision.stage != 0:
        return 0
    tokens, replicas_of = 0, dict[int, dict[PeerId, Replica]]()
    for descriptor in (entry.descriptor for entry in decision.entries):
        # Payloads in logs of version 2 name no plan, and a payload may name one that is not kept any more.
        plan = state.plan_of(descriptor.epoch) or state.plan_for(decision.round_number)
        if plan.epoch not in replicas_of:
            replicas_of[plan.epoch] = {member.peer: each for each in plan.replicas for member in each.members}
        if (replica := replicas_of[plan.epoch].get(descriptor.owner)) is not None:
            tokens += payload_tokens(state.spec, replica, descriptor)
    return tokens
