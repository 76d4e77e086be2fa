"""Scores: who loses weight by what several members tell, who regains it, and what no single liar can do."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.membership.scores import ROUNDS_TO_RISE, ROUNDS_TO_STRIKE, Scores
from coordinator.run.state.commands import Attest, Await, Offer, Report, Start
from coordinator.run.state.events import PeerQuarantined, PeerWeighed
from coordinator.status.causes import peer_cause
from coordinator.status.messages import event_message
from coordinator.store.history_fold import changes_of
from coordinator.store.history_tables import Contribution
from coordinator.store.omissions import why_not
from protocol.spec.fixed import COLD_STEPS
from protocol.status import CauseCode, Measurement, PayloadAgreement
from protocol.types import Committed
from tests.builders import Keyed, anchor_of, keyed, spec_of
from tests.support.coordinator_run import Run

ALL = tuple(keyed(number) for number in range(7))
BAD = ALL[-1]
COLD = 2 * COLD_STEPS // 2
"""Rounds of two steps in which the payloads of a newcomer are not judged."""
Tells = Callable[[Keyed, Keyed, int], tuple[float | None, float] | tuple[float | None, float, float]]
"""The cosine and norm that a member tells of the payload of another in a round, and perhaps its likeness."""


def usual(_: Keyed, owner: Keyed, __: int) -> tuple[float | None, float]:
    return (-0.2 if owner is BAD else 0.2), 1.0


class Swarm:
    """Replicas of one stage, the last of them BAD, whose members tell what `tells` answers."""

    def __init__(self, tells: Tells = usual, count: int = 5, rounds: int = 90) -> None:
        self.peers, self.tells, self.scores = (*ALL[: count - 1], BAD), tells, Scores()
        self.hasty: tuple[
            Keyed, ...
        ] = ()  # members that tell before the others, and begin the next round at once
        self.away: Keyed | None = None  # a member that waits for decisions and offers nothing
        self.silent: Keyed | None = None  # a member that tells nothing
        self.run = Run(spec_of(stages=1, replicas=count, rounds=rounds))
        self.run.accept(Start())
        for peer in self.peers:
            self.run.accept(peer.join(self.run.spec))

    def play(self, rounds: int = 1) -> None:
        for _ in range(rounds):
            run, number = self.run, self.run.state.current_round
            live = [peer for peer in self.peers if run.state.peers[peer.peer].is_live]
            hosts = [
                peer for peer in live if run.state.takes_part(peer.peer, number) and peer is not self.away
            ]
            if self.away is not None:
                run.accept(Await(self.away.peer, 0, number, run.state.plan_for(number).epoch))
            payloads = tuple(peer.payload(run.spec, 0, number) for peer in hosts)
            run.now += 100.0
            for peer, payload in zip(hosts, payloads, strict=True):
                run.accept(Offer(peer.peer, payload))
            for peer in hosts:
                run.accept(Report(peer.peer, 0, number, payloads))
            for peer in live:
                run.accept(Attest(peer.peer, 0, number, "stage", anchor_of(0, number)))
            for sender in self.hasty:
                self.tell(sender, hosts, number)
            for sender in self.hasty:
                self.tell(sender, [], number + 1)
            for sender in hosts:
                if sender is not self.silent:
                    self.tell(sender, hosts, number)

    def tell(self, sender: Keyed, owners: Sequence[Keyed], number: int) -> None:
        agreements = tuple(
            PayloadAgreement(0, owner.peer, cosine, norm, mean_norm=1.0, likeness=(*likeness, 0.3)[0])
            for owner in owners
            for cosine, norm, *likeness in (self.tells(sender, owner, number),)
        )
        told = Measurement(sender.peer, number, 0, 0, agreements=agreements)
        for weigh in self.scores.note(self.run.state, told):
            self.run.accept(weigh)

    def counted(self, number: int) -> set[str]:
        decision = self.run.state.decisions[0, number]
        assert isinstance(decision, Committed)
        return {entry.descriptor.owner for entry in decision.entries}

    @property
    def changes(self) -> list[PeerWeighed]:
        return [event for event in self.run.events if isinstance(event, PeerWeighed)]


def test_payloads_against_the_others_count_for_nothing_after_one_round() -> None:
    swarm = Swarm()
    swarm.play(6)
    (change,) = swarm.changes
    assert (change.peer, change.counts) == (BAD.peer, False)
    assert BAD.peer in swarm.counted(1)
    assert BAD.peer not in swarm.counted(2)
    assert swarm.counted(6) == {peer.peer for peer in swarm.peers[:-1]}
    assert "NOTHING" in event_message(change)
    assert "bad scores" in swarm.run.state.decisions[0, 6].reason
    left_out = [
        why_not(change)
        for event, before, after in swarm.run.steps
        for change in changes_of(0, event, before, after)
        if isinstance(change, Contribution) and change.peer == BAD.peer and change.cause
    ]
    assert left_out[-1] == "its payloads count for nothing until they agree with the others and copy none"
    cause = peer_cause(swarm.run.state, BAD.peer)
    assert cause is not None
    assert cause.code is CauseCode.DISCOUNTED
    assert peer_cause(swarm.run.state, ALL[0].peer) is None


def test_payloads_that_stay_bad_end_in_quarantine() -> None:
    swarm = Swarm()
    swarm.play(2 * ROUNDS_TO_STRIKE + 8)
    assert [event.peer for event in swarm.run.events if isinstance(event, PeerQuarantined)] == [BAD.peer]


def test_a_contributor_whose_payloads_become_good_regains_its_weight() -> None:
    swarm = Swarm(lambda _, owner, number: ((-0.2 if owner is BAD and number <= 5 else 0.2), 1.0))
    swarm.play(10)
    assert BAD.peer not in swarm.counted(10)
    swarm.play(ROUNDS_TO_RISE)
    assert [change.counts for change in swarm.changes] == [False, True]
    assert BAD.peer in swarm.counted(swarm.run.state.current_round - 1)


@pytest.mark.parametrize("is_away", [False, True])
def test_one_liar_of_four_takes_no_weight_where_another_member_tells_nothing(is_away: bool) -> None:
    """Two members measure each payload then, so that one of them is the liar."""
    swarm = Swarm(
        lambda sender, owner, _: ((-1.0 if (sender, owner) == (BAD, ALL[0]) else 0.2), 1.0), count=4
    )
    swarm.away, swarm.silent = (ALL[1], None) if is_away else (None, ALL[1])
    swarm.play(30)
    assert not swarm.changes


@pytest.mark.parametrize(
    "tells",
    [
        lambda sender, owner, _: ((-1.0 if sender is BAD or owner is BAD else 0.2), 1.0),
        lambda sender, owner, _: ((-1.0 if sender is BAD else 0.2), 1.0),
    ],
    ids=["a bad one that slanders", "slander alone"],
)
def test_one_liar_takes_the_weight_of_no_honest_contributor(tells: Tells) -> None:
    swarm = Swarm(tells)
    swarm.play(12)
    assert {change.peer for change in swarm.changes} <= {BAD.peer}


@pytest.mark.parametrize(
    ("cosine", "norm"), [(None, 0.0), (0.0, 1.0), (0.2, 7.9)], ids=["zeros", "noise", "a giant"]
)
def test_payloads_that_say_nothing_or_shout_are_as_bad(cosine: float | None, norm: float) -> None:
    swarm = Swarm(lambda _, owner, __: (cosine, norm) if owner is BAD else (0.2, 1.0))
    swarm.play(6)
    assert {change.peer for change in swarm.changes} == {BAD.peer}


def test_two_liars_that_tell_first_take_the_weight_of_no_honest_contributor() -> None:
    liars, victim = (ALL[0], ALL[1]), ALL[2]
    swarm = Swarm(
        lambda sender, owner, _: (-1.0 if sender in liars and owner is victim else 0.2, 1.0), count=7
    )
    swarm.hasty = liars
    swarm.play(12)
    assert not swarm.changes


NOISE, COPY, ALTERED = (0.01, 1.0), (0.2, 1.0, 1.0), (0.3, 1.0, 0.7)
"""Cosine, norm and likeness of payloads that do not work against the others."""


@pytest.mark.parametrize("bad", [NOISE, COPY], ids=["noise", "copy"])
def test_a_single_round_without_harm_does_not_judge(bad: tuple[float, ...]) -> None:
    swarm = Swarm(lambda _, owner, number: bad if owner is BAD and number % 5 == 1 else (0.2, 1.0))
    swarm.play(12)
    assert not swarm.changes


@pytest.mark.parametrize("bad", [COPY, ALTERED], ids=["copy", "altered copy"])
def test_copies_lose_their_weight_however_well_they_agree(bad: tuple[float, ...]) -> None:
    swarm = Swarm(lambda _, owner, __: bad if owner is BAD else (0.2, 1.0))
    swarm.play(6)
    assert [(change.peer, change.counts) for change in swarm.changes] == [(BAD.peer, False)]
    assert BAD.peer in swarm.counted(2)
    assert BAD.peer not in swarm.counted(4)


def test_where_all_payloads_are_like_each_other_none_is_a_copy() -> None:
    swarm = Swarm(lambda _, owner, __: (0.9, 1.0, 0.95 if owner is BAD else 0.85))
    swarm.play(6)
    assert not swarm.changes


def test_members_that_do_not_tell_keep_a_bad_payload_for_one_round_more() -> None:
    """Of four, all must tell, or wait for the next round. Of seven, one may be silent."""
    swarm = Swarm(count=7)
    swarm.silent = ALL[0]
    swarm.play(3)
    assert BAD.peer not in swarm.counted(2)
    swarm = Swarm(count=4)
    swarm.silent = ALL[0]
    swarm.play(4)
    assert BAD.peer in swarm.counted(2)
    assert BAD.peer not in swarm.counted(3)


def test_who_cheats_in_every_second_round_loses_its_weight() -> None:
    swarm = Swarm(lambda _, owner, number: ((0.0 if owner is BAD and number % 2 else 0.2), 1.0))
    swarm.play(12)
    assert [change.counts for change in swarm.changes] == [False]


@pytest.mark.parametrize("count", [2, 3])
def test_among_three_nobody_can_tell_who_lies(count: int) -> None:
    swarm = Swarm(count=count)
    swarm.play(8)
    assert not swarm.changes


def test_a_newcomer_is_not_judged_while_its_moments_are_cold() -> None:
    late = ALL[0]
    swarm = Swarm(lambda _, owner, number: ((0.02 if owner is late and number <= COLD + 2 else 0.2), 1.0))
    swarm.away = late
    swarm.play(2)
    swarm.away = None
    swarm.play(COLD + 6)
    assert not swarm.changes


def test_what_was_not_offered_and_what_is_told_of_itself_are_dropped() -> None:
    swarm = Swarm(lambda sender, owner, _: ((9.0 if sender is owner else -0.2 if owner is BAD else 0.2), 1.0))
    swarm.play(6)
    assert {change.peer for change in swarm.changes} == {BAD.peer}
    stranger = PayloadAgreement(0, keyed(30).peer, -1.0, 1.0, mean_norm=1.0)
    state = swarm.run.state
    told = Measurement(ALL[0].peer, state.current_round, 0, 0, agreements=(stranger,) * 1000)
    assert swarm.scores.note(state, told) == []


@given(st.data())
@settings(max_examples=10, deadline=None)
def test_no_lies_of_two_among_seven_take_the_weight_of_an_honest_contributor(data: st.DataObject) -> None:
    liars, honest = ALL[:2], st.tuples(st.floats(0.15, 0.25), st.floats(0.8, 1.2), st.floats(0.2, 0.4))
    lies = st.tuples(st.floats(-1, 1), st.floats(0, 100), st.floats(-1, 1))
    told: dict[tuple[Keyed | None, Keyed, int], tuple[float, float, float]] = {}

    def tells(sender: Keyed, owner: Keyed, number: int) -> tuple[float, float, float]:
        """What is true of a payload is the same for all who tell it."""
        key = (sender if sender in liars else None), owner, number
        if key not in told:
            told[key] = data.draw(lies if sender in liars else honest)
        return told[key]

    swarm = Swarm(tells, count=7)
    swarm.hasty = liars
    swarm.play(6)
    assert not {change.peer for change in swarm.changes} - {liar.peer for liar in liars}
