"""Which members of a group may reduce: those that others can dial, except for some after an aborted round.

A reducer whose parts do not reach the others costs every round in which it reduces. So after a round without
agreement the fewest members that explain it reduce nothing for some rounds. They still train, send their
payloads and get the results.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from coordinator.state.state import Bench, Round
from protocol.types import PeerId

FIRST_BENCH, LONGEST_BENCH = 8, 512
"""Rounds. Each further one of the same member lasts twice as long."""


def failed_reducers(round_state: Round) -> frozenset[PeerId]:
    """The fewest members (by a greedy search) that explain why a group did not agree on a result.

    Each member tells whose parts it lacks. One of the two is to blame, and who takes part in most of these
    pairs is named first: a dead reducer that all accuse, or a liar that accuses all. If a reducer that others
    accuse names one member alone, that is its checker, which has not signed: nobody can tell who of them is
    wrong, and both are named if two others remain. If nobody tells anything, all that may reduce and have no
    result are named. Members that reduce nothing are never in the result.
    """
    group = round_state.group
    if group is None:
        return frozenset()
    pairs = {(teller, owner) for owner, tellers in round_state.rejections.items() for teller in tellers}
    reducing = {
        descriptor.owner
        for descriptor, line in zip(group.descriptors, group.lines, strict=True)
        if line.is_open
    }
    found = set[PeerId]() if pairs else reducing - round_state.results.keys()
    pairs = {(teller, owner) for teller, owner in pairs if owner in reducing}
    told = pairs
    while pairs:
        times = Counter(peer for pair in pairs for peer in pair)
        # Of members that are named as often, first one that has nothing to lose.
        worst = min(times, key=lambda peer: (-times[peer], peer in reducing, peer))
        found.add(worst)
        accusers = [teller for teller, owner in told if owner == worst]
        accused = {owner for teller, owner in told if teller == worst}
        if len(accusers) > 1 and len(accused) == 1 and len(reducing - found - accused) > 1:
            found |= accused
        pairs = {pair for pair in pairs if not found & {*pair}}
    return frozenset(found & reducing)


def with_benches(
    benches: Mapping[PeerId, Bench], round_number: int, failed: frozenset[PeerId]
) -> dict[PeerId, Bench]:
    """The benches after an aborted round: of `failed`, from the next round on."""
    found = dict(benches)
    for peer in sorted(failed):
        last = benches.get(peer)
        rounds = FIRST_BENCH if last is None else min(2 * last.rounds, LONGEST_BENCH)
        found[peer] = Bench(round_number + rounds, rounds)
    return found
