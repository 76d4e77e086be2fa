"""Makes the next plan faster at no cost: members change places, k of links and shares of work change.

None of these changes moves any state, since anchors are bit-equal on all replicas after a round. They follow
the measurements of peers and the cost model (coordinator.placement.cost_model); where nothing is known,
nothing changes.

Pure: the same peers in another order give the same result.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from coordinator.placement.cost_model import bounded_seconds, seconds_per_microbatch, survey_of
from coordinator.placement.eligibility import fits, is_synced, may_be_neighbours, peer_rests_until
from coordinator.placement.links import fit_k, member_of
from coordinator.placement.member_exchange import MemberExchange
from coordinator.placement.shares import delivered_work, share_limits, share_out
from coordinator.state.state import State, peers_of
from coordinator.state.text import listed
from protocol.types import Member, PeerId, Replica


class Rebalance:
    """Makes the replicas of the plan that takes over at `from_round` faster."""

    def __init__(self, state: State, from_round: int) -> None:
        self._state, self._spec, self._from_round = state, state.spec, from_round
        self._survey = survey_of(state)
        # A report before the first decision of a round may still be about the round before it. So a measured
        # time counts only for chains that are in both plans.
        earlier, newest = state.plan_for(max(1, from_round - 2)), state.plans[-1]
        self._lasting = set(map(_chain, earlier.replicas)) & set(map(_chain, newest.replicas))
        self._delivered = delivered_work(state)

    def run(self, replicas: Sequence[Replica], is_settled: bool) -> tuple[list[Replica], list[str]]:
        """`replicas` with faster members, k and shares, and sentences that say what changes and why.

        Members change places only if `is_settled`, which means that no replica comes or goes with this plan,
        and only after a first commit, since no share could follow before.
        """
        spec, state = self._spec, self._state
        running = {replica.index for replica in state.plans[-1].replicas}
        pause = self._from_round - state.rebalanced_at
        may_change = not state.rebalanced_at or pause >= spec.grouping.settle_rounds
        result, exchanges, shares = list(replicas), list[str](), list[str]()
        if is_settled and may_change and self._delivered:
            movable = [replica.index for replica in result if self._may_exchange(replica)]
            spares, rule = self._spares(), partial(may_be_neighbours, state)
            search = MemberExchange(
                spec, self._survey, result, movable, spares, self._may_host, may_be_neighbours=rule
            )
            result, exchanges = search.run()
        result, widths = fit_k(spec, self._survey, result, running, self._from_round)
        # Shares are chosen last: they depend on the members and on k.
        are_changed = [*map(peers_of, result)] != [*map(peers_of, state.plans[-1].replicas)]
        if are_changed or may_change:
            seconds = [self._microbatch_seconds(replica) for replica in result]
            limits = share_limits(state, result, self._delivered)
            result, shares = share_out(spec, result, seconds, limits, are_changed)
        return result, [*exchanges, *([listed(widths)] if widths else []), *shares]

    def _may_exchange(self, replica: Replica) -> bool:
        """Whether all members of a pipeline stay, have measured their speed and are in sync."""
        return len(replica.members) > 1 and all(
            self._state.peers[each.peer].is_staying
            and self._is_measured(each.peer)
            and is_synced(self._state, each, self._from_round)
            for each in replica.members
        )

    def _spares(self) -> list[Member]:
        """Peers that follow the rounds of their stages and could train at once."""
        state = self._state
        assigned = state.assignments[state.plans[-1].epoch]
        return [
            member_of(peer, reservation.stages)
            for peer in state.staying
            for reservation in [state.reservations.get(peer.peer)]
            if reservation is not None
            and peer.policy.joins_pipelines
            and peer.peer not in assigned
            and self._is_measured(peer.peer)
            and is_synced(state, reservation, self._from_round)
            and peer_rests_until(state, peer.peer) <= self._from_round
        ]

    def _may_host(self, member: Member, members_left: int) -> bool:
        return fits(self._state, member.peer, member.stages, members_left)

    def _is_measured(self, peer: PeerId) -> bool:
        return self._state.estimates[peer].capacity.flops > 0

    def _microbatch_seconds(self, replica: Replica) -> float:
        """As the first member measured if the chain has not changed, else predicted; 0 if unknown."""
        measured = self._state.estimates[replica.members[0].peer].microbatch_seconds
        if measured > 0 and _chain(replica) in self._lasting:
            return bounded_seconds(measured)
        return seconds_per_microbatch(self._spec, self._survey, *_chain(replica))


def _chain(replica: Replica) -> tuple[tuple[Member, ...], tuple[int, ...]]:
    return replica.members, tuple(link.k for link in replica.links)
