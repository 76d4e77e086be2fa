"""Which members of a group may reduce: those that others can dial, except for some after an aborted round.

A reducer whose parts do not reach the others costs every round in which it reduces. So after a round without
agreement the fewest members that explain it reduce nothing for some rounds. They still train, send their
payloads and get the results.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

from coordinator.run.state.records import Round
from protocol.types import PayloadDescriptor, PeerId

FIRST_BENCH, LONGEST_BENCH = 8, 512
"""Rounds. Each further one of the same member lasts twice as long."""


Bench = tuple[int, int]
"""A member reduces nothing up to the first number, a round; the second is how many rounds that lasts."""


def failed_reducers(round_state: Round) -> frozenset[PeerId]:
    """The fewest members (by a greedy search) that explain why a group did not agree on a result.

    A member that lacks parts accuses their reducer. In each pair of an accuser and an accused one of the two
    has failed. The search takes the member that is in most pairs, then drops its pairs, until no pair is
    left. So a dead reducer is found, which all accuse, and a liar, which accuses all.

    A reducer whose checker has not signed accuses that checker, while the others accuse the reducer. Nobody
    can tell which of the two has failed, so both are found, if two other reducers remain. If the checker is
    found for other reasons, that explains why the others lack the parts of its reducer. If there are no
    accusations, all reducers without a result are found. Members that do not reduce are never found.
    """
    group = round_state.group
    if group is None:
        return frozenset()
    reducing = {
        descriptor.owner
        for descriptor, line in zip(group.descriptors, group.lines, strict=True)
        if line.is_open
    }
    if not round_state.rejections:
        return frozenset(reducing - round_state.results.keys())
    accusations = {
        (accuser, accused)
        for accused, accusers in round_state.rejections.items()
        for accuser in accusers
        if accused in reducing
    }
    accusers_of, accused_by = defaultdict[PeerId, set[PeerId]](set), defaultdict[PeerId, set[PeerId]](set)
    for accuser, accused in accusations:
        accusers_of[accused].add(accuser)
        accused_by[accuser].add(accused)
    found, pairs = set[PeerId](), accusations
    while pairs:
        times = Counter(peer for pair in pairs for peer in pair)
        # Of members that are in as many pairs, first one that does not reduce: it loses nothing.
        worst = min(times, key=lambda peer: (-times[peer], peer in reducing, peer))
        found.add(worst)
        checker = accused_by[worst]
        if len(accusers_of[worst]) > 1 and len(checker) == 1 and len(reducing - found - checker) > 1:
            found |= checker
        pairs = {
            (accuser, accused)
            for accuser, accused in pairs
            # Its checker is found: so nobody could take its sums.
            if not found & {accuser, accused} and not (accused_by[accused] and accused_by[accused] <= found)
        }
    return frozenset(found & reducing)


def with_benches(
    benches: Mapping[PeerId, Bench], round_number: int, failed: frozenset[PeerId]
) -> dict[PeerId, Bench]:
    """The benches after an aborted round: of `failed`, from the next round on."""
    found = dict(benches)
    for peer in sorted(failed):
        last = benches.get(peer)
        rounds = FIRST_BENCH if last is None else min(2 * last[1], LONGEST_BENCH)
        found[peer] = round_number + rounds, rounds
    return found


def is_benched(benches: Mapping[PeerId, Bench], descriptor: PayloadDescriptor) -> bool:
    """Whether the owner of a payload reduces nothing in its round."""
    bench = benches.get(descriptor.owner)
    return bench is not None and descriptor.round_number <= bench[0]
