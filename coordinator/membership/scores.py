"""Scores of contributors: which payloads agree so little with the others that they count for nothing.

Members measure the cosine of each payload of their group with the weighted sum of the others
(node.agreement.meter). Of one payload several members tell it, and the median counts, so that no single
member decides. A value is that median, divided by the median of the payloads of the same kind of replica: 1
for a usual payload, 0 for noise, for zeros and for a payload that works against the others. No single round
judges: the mean over some rounds does.

A contributor that falls below :data:`LEAST_MEAN` gets a strike, and its payloads are gathered and measured,
but not committed, until its mean exceeds :data:`GOOD_MEAN`. Three strikes are a quarantine.
The bytes of an earlier round have the value 0, too.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from statistics import fmean, median

from coordinator.membership.strikes import strike
from coordinator.run.state.commands import Weigh
from coordinator.run.state.events import PeerWeighed
from coordinator.run.state.state import State
from coordinator.run.state.transaction import Transaction
from protocol.group.measured import measured_owners
from protocol.spec.fixed import COLD_STEPS
from protocol.status import Measurement, PayloadAgreement
from protocol.types import PeerId

LEAST_MEAN, ROUNDS_TO_FALL, LEAST_VALUES = 0.55, 4, 3
"""Honest payloads have values of 0.7 to 1 in small runs, and bad ones 0: two of four rounds are enough."""
GOOD_MEAN, ROUNDS_TO_RISE = 0.7, 8
"""A contributor that cheats in some rounds must be honest for longer than the cheating took to be noticed."""
ROUNDS_TO_STRIKE = 12
"""A contributor whose payloads stay bad gets another strike after this many rounds."""
ROUNDS_TO_FORGIVE = 16
"""Who left out every second round would never be judged, if each return counted as a new beginning."""
ROUNDS_TO_REPEAT = 32
"""For so long the bytes of payloads are known again: who sends them anew has trained nothing."""
LEAST_MEASURERS = 2
"""One liar must not decide what another payload is worth."""
LEAST_PAYLOADS = 3
"""Of two payloads that differ, either may be the bad one."""
LEAST_COSINE = 0.005
"""If even usual payloads agree less, values would be noise."""
MOST_NORM = 4.0
"""A payload of more than this many times the median norm has the value 0: honest ones differ by a tenth."""


class Scores:
    """What members have told about each other's payloads in the last rounds, and the values that follow.

    Nothing is stored: after a restart of the coordinator values are gathered anew, and weights stay.
    """

    def __init__(self) -> None:
        self._told: dict[int, dict[tuple[int, PeerId], dict[PeerId, PayloadAgreement]]] = {}
        self._judged = 0
        self._seen: dict[tuple[int, str], int] = {}  # by stage and hash of a payload, the last round of it
        self._values: dict[PeerId, deque[float]] = {}
        self._offered: dict[PeerId, tuple[int, int]] = {}  # since when it may be cold, and its last round
        self._fell_in: dict[PeerId, int] = {}

    def note(self, state: State, measurement: Measurement) -> list[Weigh]:
        """Take the figures of one member. Returns the weights that change by the rounds that are over.

        Figures about payloads that the member does not measure (protocol.group.measured) are dropped. A
        round is judged when the next one is over: all members have had the time to tell, so that those who
        tell first do not decide. Never raises.
        """
        round_number, sender = measurement.round_number, measurement.peer
        if self._judged < round_number <= state.current_round and sender not in state.discounted:
            self._keep(state, measurement)
        over = sorted(each for each in self._told if each < state.current_round - 1)
        return [weigh for each in over for weigh in self._judge(state, each)]

    def _keep(self, state: State, measurement: Measurement) -> None:
        round_number, sender = measurement.round_number, measurement.peer
        told, measured = self._told.setdefault(round_number, {}), dict[int, tuple[PeerId, ...]]()
        for each in measurement.agreements:
            if not state.is_decided(each.stage, round_number):
                continue
            if each.stage not in measured:
                owners = state.round_of(each.stage, round_number).offers
                measured[each.stage] = measured_owners(owners, sender, each.stage, round_number)
            if each.owner in measured[each.stage]:
                told.setdefault((each.stage, each.owner), {})[sender] = each

    def _judge(self, state: State, round_number: int) -> Iterator[Weigh]:
        self._judged = round_number
        repeated = set(self._repeated(state, round_number))
        cold = set(self._cold(state, round_number))
        for peer, value in values_of(state, round_number, self._told.pop(round_number), repeated).items():
            if peer in cold:
                continue
            values = self._values.setdefault(peer, deque(maxlen=ROUNDS_TO_RISE))
            values.append(value)
            recent = list(values)[-ROUNDS_TO_FALL:]
            is_bad = len(recent) >= LEAST_VALUES and fmean(recent) < LEAST_MEAN
            is_good = len(values) == ROUNDS_TO_RISE and fmean(values) > GOOD_MEAN
            is_due = round_number - self._fell_in.get(peer, -ROUNDS_TO_STRIKE) >= ROUNDS_TO_STRIKE
            if is_bad and (peer not in state.discounted or is_due):
                self._fell_in[peer] = round_number
                yield Weigh(peer, round_number, False, fmean(recent))
            elif is_good and peer in state.discounted:
                yield Weigh(peer, round_number, True, fmean(values))

    def _cold(self, state: State, round_number: int) -> Iterator[PeerId]:
        """The peers that began or returned so lately that their moments are cold: their payloads are noisy.

        All members of a first round are cold alike. Who stays away again and again is not forgiven again.
        """
        rounds = math.ceil(2 * COLD_STEPS / state.spec.inner.steps)
        offers = (state.round_of(stage, round_number).offers for stage in range(state.stages))
        for peer in {peer for each in offers for peer in each}:
            first, last = self._offered.get(peer, (round_number, round_number))
            is_back = round_number - last > state.spec.outer.turns
            if is_back and (first == 1 or round_number - first >= ROUNDS_TO_FORGIVE):
                first = round_number
            self._offered[peer] = first, round_number
            if first > 1 and round_number - first < rounds:
                yield peer

    def _repeated(self, state: State, round_number: int) -> Iterator[tuple[int, PeerId]]:
        """Stage and owner of each payload with the bytes of an earlier round: a copy, or an old one."""
        oldest = round_number - ROUNDS_TO_REPEAT
        self._seen = {key: last for key, last in self._seen.items() if last >= oldest}
        for stage in range(state.stages):
            for owner, descriptor in state.round_of(stage, round_number).offers.items():
                if self._seen.get((stage, descriptor.sha256), round_number) < round_number:
                    yield stage, owner
                self._seen[stage, descriptor.sha256] = round_number


def values_of(
    state: State,
    round_number: int,
    told: Mapping[tuple[int, PeerId], Mapping[PeerId, PayloadAgreement]],
    repeated: Collection[tuple[int, PeerId]] = (),
) -> dict[PeerId, float]:
    """The value of each contributor of a round: the mean over its stages of those that can be told.

    `repeated` are the stages and owners of payloads that were sent in an earlier round.
    """
    found: dict[PeerId, list[float]] = {}
    for stage in {stage for stage, _ in told}:
        figures = {
            owner: (
                median(_cosine(each) for each in measured.values()),
                median(each.norm for each in measured.values()),
            )
            for (its_stage, owner), measured in told.items()
            if its_stage == stage and len(measured) >= LEAST_MEASURERS
        }
        for owner, value in _values(state, round_number, figures):
            found.setdefault(owner, []).append(0.0 if (stage, owner) in repeated else value)
    return {owner: fmean(values) for owner, values in sorted(found.items())}


def _values(
    state: State, round_number: int, figures: Mapping[PeerId, tuple[float, float]]
) -> Iterator[tuple[PeerId, float]]:
    """The value of each payload of one stage, from its cosine and norm."""
    kinds = {}
    for owner in figures:
        assignment = state.assignment(owner, round_number)
        kinds[owner] = None if assignment is None else assignment.replica.is_full
    usual_norm = median(norm for _, norm in figures.values()) if figures else 0.0
    for owner, (cosine, norm) in figures.items():
        alike = [each for each, (_, _) in figures.items() if kinds[each] == kinds[owner]]
        group = alike if len(alike) >= LEAST_PAYLOADS else list(figures)
        usual = median(figures[each][0] for each in group)
        if len(figures) >= LEAST_PAYLOADS and usual >= LEAST_COSINE:
            is_giant = norm > MOST_NORM * usual_norm
            yield owner, 0.0 if is_giant else max(0.0, min(1.0, cosine / usual))


def _cosine(figures: PayloadAgreement) -> float:
    """0 for a payload without a direction, such as one of zeros."""
    return figures.cosine if figures.cosine is not None and math.isfinite(figures.cosine) else 0.0


def weigh(transaction: Transaction, command: Weigh) -> None:
    """Let the payloads of a contributor count or not, from the next decision on.

    At least three replicas keep their weight: of two that differ, either may be the bad one.
    """
    state, peer = transaction.state, command.peer
    if command.counts:
        if peer in state.discounted:
            transaction.add(PeerWeighed(transaction.now, peer, command.round_number, True, command.score))
        return
    if peer not in state.discounted:
        if len(list(_counting(state, peer))) < LEAST_PAYLOADS:
            return
        transaction.add(PeerWeighed(transaction.now, peer, command.round_number, False, command.score))
    reason = f"its payloads agree with those of the others by {command.score:.2f} of what is usual"
    strike(transaction, peer, command.round_number, reason)


def _counting(state: State, without: PeerId) -> Iterable[int]:
    """The replicas of the current plan that have no member of weight 0, but for `without`."""
    discounted = state.discounted | {without}
    for replica in state.plan_for(state.current_round).replicas:
        if not any(member.peer in discounted for member in replica.members):
            yield replica.index
