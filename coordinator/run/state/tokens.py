"""How many tokens a run has trained, from its decisions: exact under restarts and churn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from protocol.math.turns import rounds_behind
from protocol.spec.run import RunSpec
from protocol.types import Decision, PayloadDescriptor, PeerId, Replica, entries_of

if TYPE_CHECKING:
    from coordinator.run.state.state import State


def payload_tokens(spec: RunSpec, replica: Replica, payload: PayloadDescriptor) -> int:
    """The tokens that a payload stands for, by a member of `replica`.

    Where stages exchange in turn, all rounds since the last turn count like that of the payload.
    """
    # A replica that did a part of its inner phase has that part of its weight.
    samples = spec.samples_per_round(spec.microbatches_of(replica))
    rounds = rounds_behind(spec, payload.stage, payload.round_number)
    return round(payload.weight / replica.weight * samples * spec.model.context * rounds)


def worths(state: State, decision: Decision) -> Iterator[tuple[PayloadDescriptor, int]]:
    """Each payload of `decision`, which is made in `state`, and the tokens that it stands for."""
    replicas_of: dict[int, dict[PeerId, Replica]] = {}
    for payload in (entry.descriptor for entry in entries_of(decision)):
        # A payload may name a plan that is not kept any more.
        plan = state.plan_of(payload.epoch) or state.plan_for(decision.round_number)
        if plan.epoch not in replicas_of:
            replicas_of[plan.epoch] = {member.peer: each for each in plan.replicas for member in each.members}
        replica = replicas_of[plan.epoch].get(payload.owner)
        yield payload, payload_tokens(state.spec, replica, payload) if replica else 0


def decided_tokens(state: State, decision: Decision) -> int:
    """The tokens whose training `decision` commits. Stage 0 counts for all stages, the others give 0."""
    return sum(tokens for _, tokens in worths(state, decision)) if decision.stage == 0 else 0
