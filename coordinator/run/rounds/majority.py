"""Whether enough of the replicas, by weight, contribute to a round."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.run.state.state import State
from protocol.types import ExchangeGroup, ManifestEntry

_ROUNDING = 1e-6
"""Sums of weights are rounded."""


def lacks_weight(state: State, stage: int, group: ExchangeGroup, entries: Sequence[ManifestEntry]) -> str:
    """Why replicas that weigh so little cannot decide the round; "" if they can.

    They need more than half of what the plan assigns to the replicas that could have contributed. Half is
    enough if others have offered, and their payloads cannot count: of two replicas, one may send rubbish.

    A replica counts with its whole weight even if it has done a part of its phase: a slow one is present.
    Replicas that lack a member or withhold do not count, or nothing could be committed without them.
    """
    round_number = state.current_round
    owners = {entry.descriptor.owner for entry in entries}
    offering = {descriptor.owner for descriptor in group.descriptors}
    live = {replica.index for replica in state.complete_replicas(round_number)}
    withheld, weight, offered, live_weight = state.round_of(stage, round_number).withheld, 0.0, 0.0, 0.0
    for replica in state.plan_for(round_number).replicas:
        host = replica.host_of(stage).peer
        weight += (host in owners) * replica.weight
        offered += (host in offering) * replica.weight
        could_contribute = host in offering or (replica.index in live and host not in withheld)
        live_weight += could_contribute * replica.weight
    half = live_weight / 2
    if weight > half + _ROUNDING or (weight > half - _ROUNDING and offered > half + _ROUNDING):
        return ""
    return f"replicas that weigh {weight:g} of {live_weight:g} contribute, and more than half must"
