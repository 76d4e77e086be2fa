"""Which answers of replicas, and reports of members, a round still waits for."""

from __future__ import annotations

from collections.abc import Iterator

from coordinator.run.state.state import Round, State
from protocol.types import PeerId


def missing_offers(state: State, stage: int, round_number: int) -> list[int]:
    """The indices of the complete replicas that have neither offered nor withheld a payload yet."""
    round_state = state.round_of(stage, round_number)
    answered = {*round_state.offers, *round_state.withheld}
    replicas = state.complete_replicas(round_number)
    return [replica.index for replica in replicas if replica.host_of(stage).peer not in answered]


def missing_reports(state: State, round_state: Round) -> list[PeerId]:
    """The members of the group that have not reported yet, and that are live and still take part."""
    return list(_missing_reports(state, round_state))


def _missing_reports(state: State, round_state: Round) -> Iterator[PeerId]:
    members = round_state.group.descriptors if round_state.group else ()
    unreported = (d for d in members if d.owner not in round_state.reports)
    return (
        d.owner
        for d in unreported
        if state.takes_part(d.owner, d.round_number) and state.peers[d.owner].is_live
    )


def all_have_reported(state: State, round_state: Round) -> bool:
    """Whether :func:`missing_reports` is empty; each report asks this."""
    return next(_missing_reports(state, round_state), None) is None


def all_have_answered(state: State, stage: int, round_number: int) -> bool:
    """Whether each complete replica has offered or withheld a payload of `stage`, and at least one has."""
    round_state, plan = state.round_of(stage, round_number), state.plan_for(round_number)
    # A cheap check first: this runs for each offer, and the other check visits all replicas.
    answers = len(round_state.offers) + len(round_state.withheld)
    without = len(state.absent.get(plan.epoch, ())) + len(state.failed_links)
    enough = answers > 0 and answers + without >= len(plan.replicas)
    return enough and not missing_offers(state, stage, round_number)
