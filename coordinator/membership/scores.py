"""Scores of contributors: which payloads agree so little with the others that they count for nothing.

Members measure the cosine of each payload of their group with the weighted sum of the others
(node.agreement.meter), and its likeness to single payloads of this round and the last ones
(node.agreement.likeness). Of one payload several members tell both, and the medians count, so that no single
member decides. A value is the smaller of two numbers and at most 1; usual is the median of the payloads of
the same kind of replica:

    agreement = cosine / usual cosine                       0 for noise and zeros; twice that below 0
    novelty   = ((1 - likeness) / (1 - usual likeness))^2   0 for a copy, below 0.25 for an altered one

The mean over some rounds judges. A single round takes the weight only of what works against the others about
as much as usual payloads work with them; no honest payload does, the least value seen is 0.2.

A contributor that falls below :data:`LEAST_MEAN` gets a strike, and its payloads are gathered and measured,
but not committed, until its mean exceeds :data:`GOOD_MEAN`. Three strikes are a quarantine.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean, median, median_high, median_low

from coordinator.membership.strikes import strike
from coordinator.run.state.commands import Weigh
from coordinator.run.state.events import PeerWeighed
from coordinator.run.state.state import State
from coordinator.run.state.transaction import Transaction
from protocol.group.measured import measured_owners
from protocol.spec.fixed import COLD_STEPS
from protocol.status import Measurement, PayloadAgreement
from protocol.types import PeerId

LEAST_MEAN, ROUNDS_TO_FALL = 0.51, 4
"""Honest payloads have means of 0.55 to 1 in small runs, and bad ones 0: two of four rounds are enough. The
rounds before the first value count as good ones."""
GOOD_MEAN, ROUNDS_TO_RISE = 0.7, 8
"""A contributor that cheats in some rounds must be honest for longer than the cheating took to be noticed."""
ROUNDS_TO_STRIKE = 12
"""A contributor whose payloads stay bad gets another strike after this many rounds."""
ROUNDS_TO_FORGIVE = 16
"""Who left out every second round would never be judged, if each return counted as a new beginning."""
LEAST_MEASURERS = 2
"""One liar must not decide what another payload is worth."""
LEAST_PAYLOADS = 3
"""Of two payloads that differ, either may be the bad one."""
LEAST_COSINE = 0.005
"""If even usual payloads agree less, values would be noise."""
LEAST_NOVELTY = 0.2
"""If even usual payloads are so like each other, likeness tells nothing."""
CONTRADICTION = 2.0
"""By this factor a value below 0 counts more: what works against the others does more harm than noise."""
MOST_NORM = 4.0
"""A payload of more than this many times the median norm has the value 0: honest ones differ by a tenth."""


class Scores:
    """What members have told about each other's payloads in the last rounds, and the values that follow.

    Nothing is stored: after a restart of the coordinator values are gathered anew, and weights stay.
    """

    def __init__(self) -> None:
        self._told: dict[int, dict[tuple[int, PeerId], dict[PeerId, PayloadAgreement]]] = {}
        self._senders: dict[int, dict[int, set[PeerId]]] = {}  # who has told, by round and stage
        self._judged = 0
        self._values: dict[PeerId, deque[float]] = {}
        self._offered: dict[PeerId, tuple[int, int]] = {}  # since when it may be cold, and its last round
        self._fell_in: dict[PeerId, int] = {}

    def note(self, state: State, measurement: Measurement) -> list[Weigh]:
        """Take the figures of one member. Returns the weights that change by the rounds that are over.

        Figures about payloads that the member does not measure (protocol.group.measured) are dropped. A
        round is judged when about two thirds of the members have told, so that a few fast ones do not decide,
        and at the latest when the next round is over. Never raises.
        """
        round_number, sender = measurement.round_number, measurement.peer
        if self._judged < round_number <= state.current_round and sender not in state.discounted:
            self._keep(state, measurement)
        last = state.current_round - 1
        over = sorted(
            each for each in self._told if each < last or (each == last and self._is_told(state, each))
        )
        return [weigh for each in over for weigh in self._judge(state, each)]

    def _is_told(self, state: State, round_number: int) -> bool:
        """Whether two thirds of the members of each stage have told; of fewer than five, all."""
        senders = self._senders[round_number]
        for stage in range(state.stages):
            owners = state.round_of(stage, round_number).offers.keys() - state.discounted
            if len(owners - senders.get(stage, set())) > max(0, len(owners) - 2) // 3:
                return False
        return True

    def _keep(self, state: State, measurement: Measurement) -> None:
        round_number, sender = measurement.round_number, measurement.peer
        told, measured = self._told.setdefault(round_number, {}), dict[int, tuple[PeerId, ...]]()
        senders = self._senders.setdefault(round_number, {})
        for each in measurement.agreements:
            if not state.is_decided(each.stage, round_number):
                continue
            if each.stage not in measured:
                owners = state.round_of(each.stage, round_number).offers
                measured[each.stage] = measured_owners(owners, sender, each.stage, round_number)
            if each.owner in measured[each.stage]:
                told.setdefault((each.stage, each.owner), {})[sender] = each
                senders.setdefault(each.stage, set()).add(sender)

    def _judge(self, state: State, round_number: int) -> Iterator[Weigh]:
        self._judged = round_number
        self._senders.pop(round_number, None)
        cold = set(self._cold(state, round_number))
        for peer, value in values_of(state, round_number, self._told.pop(round_number)).items():
            if peer in cold:
                continue
            values = self._values.setdefault(peer, deque(maxlen=ROUNDS_TO_RISE))
            values.append(value)
            score = fmean([*[1.0] * ROUNDS_TO_FALL, *values][-ROUNDS_TO_FALL:])
            is_good = len(values) == ROUNDS_TO_RISE and fmean(values) > GOOD_MEAN
            is_due = round_number - self._fell_in.get(peer, -ROUNDS_TO_STRIKE) >= ROUNDS_TO_STRIKE
            if score < LEAST_MEAN and (peer not in state.discounted or is_due):
                self._fell_in[peer] = round_number
                yield Weigh(peer, round_number, False, score)
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


def values_of(
    state: State,
    round_number: int,
    told: Mapping[tuple[int, PeerId], Mapping[PeerId, PayloadAgreement]],
) -> dict[PeerId, float]:
    """The value of each contributor of a round: the mean over its stages of those that can be told."""
    found: dict[PeerId, list[float]] = {}
    for stage in {stage for stage, _ in told}:
        figures = {
            owner: _Figures(
                # Of two that differ the kinder one counts: either may be a lie.
                median_high(_cosine(each.cosine) for each in measured.values()),
                median_low(_cosine(each.likeness) for each in measured.values()),
                median_low(each.norm for each in measured.values()),
            )
            for (its_stage, owner), measured in told.items()
            if its_stage == stage and len(measured) >= LEAST_MEASURERS
        }
        for owner, value in _values(state, round_number, figures):
            found.setdefault(owner, []).append(value)
    return {owner: fmean(values) for owner, values in sorted(found.items())}


@dataclass(frozen=True)
class _Figures:
    """The medians of what was told of a payload."""

    cosine: float
    likeness: float
    norm: float


def _values(
    state: State, round_number: int, figures: Mapping[PeerId, _Figures]
) -> Iterator[tuple[PeerId, float]]:
    """The value of each payload of one stage."""
    kinds = {}
    for owner in figures:
        assignment = state.assignment(owner, round_number)
        kinds[owner] = None if assignment is None else assignment.replica.is_full
    if len(figures) < LEAST_PAYLOADS:
        return
    usual_norm = median(each.norm for each in figures.values())
    for owner, own in figures.items():
        alike = [each for other, each in figures.items() if kinds[other] == kinds[owner]]
        group = alike if len(alike) >= LEAST_PAYLOADS else list(figures.values())
        usual = median(each.cosine for each in group)
        usual_novelty = 1 - median(each.likeness for each in group)
        if usual < LEAST_COSINE:
            continue
        value = min(1.0, own.cosine / usual)
        value = max(value, -1.0) * (CONTRADICTION if value < 0 else 1.0)
        if usual_novelty > LEAST_NOVELTY:
            value = min(value, ((1 - own.likeness) / usual_novelty) ** 2)
        yield owner, min(value, 0.0) if own.norm > MOST_NORM * usual_norm else value


def _cosine(told: float | None) -> float:
    """0 for a payload without a direction, such as one of zeros."""
    return told if told is not None and math.isfinite(told) else 0.0


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
    reason = f"its payloads have {command.score:.2f} of the usual value: they contradict the others, or copy"
    strike(transaction, peer, command.round_number, reason)


def _counting(state: State, without: PeerId) -> Iterable[int]:
    """The replicas of the current plan that have no member of weight 0, but for `without`."""
    discounted = state.discounted | {without}
    for replica in state.plan_for(state.current_round).replicas:
        if not any(member.peer in discounted for member in replica.members):
            yield replica.index
