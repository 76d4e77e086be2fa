"""What is unusual is found, named and told apart from noise; no figures make judging raise."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.ops.health.figures import MeasuredRound, PayloadFigures
from coordinator.ops.health.judge import WINDOW, Judgement, judge
from protocol.spec.data import DataSpec
from protocol.status import Sign
from protocol.types import PeerId
from tests.coordinator.ops.health.rounds import (
    PEERS,
    healthy,
    steady,
    with_losses,
    with_payloads,
    without_peer,
)
from tests.support.paths import ROOT


def judged(rounds: list[MeasuredRound]) -> list[Judgement]:
    return [judge(rounds[:count]) for count in range(1, len(rounds) + 1)]


def alarms_of(found: list[Judgement], sign: Sign) -> list[int]:
    """The rounds with an alarm about this."""
    return [
        each.round_number
        for each in found
        if any(finding.raises_alarm and finding.sign is sign for finding in each.findings)
    ]


@pytest.mark.parametrize("seed", range(20))
def test_a_healthy_run_has_no_findings(seed: int) -> None:
    assert not [each.findings for each in judged(healthy(30, seed)) if each.findings]


@pytest.mark.parametrize(
    ("recorded", "least_steps"), [("small", 1), ("larger", 1), ("claims", 2), ("dithered", 1)]
)
def test_no_recorded_run_raises_an_alarm(recorded: str, least_steps: int) -> None:
    """Losses of docs/reproduction. 1,000 single steps are noisier than what nodes measure."""
    lines = (ROOT / "docs" / "reproduction" / f"{recorded}.jsonl").read_text().splitlines()
    for trial in map(json.loads, lines):
        if trial["spec"]["inner"]["steps"] < least_steps:
            continue
        losses = trial["train"]
        rounds = [MeasuredRound(number + 1, {0: 1.0}, {0: loss}) for number, loss in enumerate(losses)]
        alarms = [each.alarm for each in judged(rounds) if each.alarm]
        assert not alarms, trial["name"]


def test_noise_of_one_replica_is_a_finding_that_names_it_and_no_alarm() -> None:
    def noise(payload: PayloadFigures) -> PayloadFigures:
        return replace(payload, cosine=0.001) if payload.owner == PEERS[1] else payload

    found = judged(with_payloads(healthy(12), 6, noise))
    assert not any(each.findings for each in found[:6])
    assert {finding.peers for finding in found[9].findings} == {(PEERS[1],)}
    assert {finding.sign for finding in found[9].findings} == {Sign.AGREEMENT}
    assert found[9].findings[0].stages == (0,)
    assert 0 <= (found[9].findings[0].value or 0.0) < 0.5
    assert not any(each.alarm for each in found)


def test_two_payloads_alone_name_nobody() -> None:
    """Each is the mean of the others for the other one."""
    rounds = [
        replace(each, payloads=tuple(one for one in each.payloads if one.owner in PEERS[:2]))
        for each in healthy(10)
    ]

    def noise(payload: PayloadFigures) -> PayloadFigures:
        return replace(payload, cosine=0.0)

    assert not any(each.findings for each in judged(with_payloads(rounds, 6, noise)))


@pytest.mark.parametrize("loss", [9.0, math.nan, math.inf, 1e9])
def test_a_loss_that_explodes_on_most_replicas_is_an_alarm_with_the_last_healthy_round(loss: float) -> None:
    rounds = with_losses(healthy(12), 10, {0: loss, 1: loss, 2: loss})
    found = judged(rounds)
    assert not any(each.alarm for each in found[:9])
    (finding,) = found[9].findings
    assert (finding.sign, finding.replicas, finding.raises_alarm) == (Sign.LOSS, (0, 1, 2), True)
    assert finding.value == (9.0 if loss == 9.0 else None)
    assert found[9].last_healthy == 9


def test_a_round_in_which_the_loss_began_to_rise_is_not_offered() -> None:
    rounds = with_losses(healthy(12), 9, dict.fromkeys(range(4), 4.7))
    rounds = with_losses(rounds, 10, dict.fromkeys(range(4), 9.0))
    assert judge(rounds[:9]).alarm == ""
    assert judge(rounds[:10]).last_healthy == 8


@pytest.mark.parametrize("loss", [9.0, math.nan])
def test_the_loss_of_one_replica_is_a_finding_about_it(loss: float) -> None:
    found = judged(with_losses(healthy(12), 10, {2: loss}))
    assert [finding.sign for finding in found[9].findings] == [Sign.LOSS]
    assert found[9].findings[0].replicas == (2,)
    assert not any(each.alarm for each in found)


def test_one_replica_of_most_of_the_weight_raises_no_alarm_alone() -> None:
    rounds = [replace(each, work={0: 10.0, 1: 1.0, 2: 1.0}) for each in healthy(12)]
    assert not any(each.alarm for each in judged(with_losses(rounds, 10, {0: 9.0})))


def test_a_run_of_one_replica_can_raise_an_alarm() -> None:
    rounds = [replace(each, work={0: 1.0}, losses={0: each.losses[0]}) for each in healthy(12)]
    assert judge(with_losses(rounds, 12, {0: math.nan})).alarm


def test_the_first_rounds_are_compared_with_nothing() -> None:
    assert not any(each.findings for each in judged(with_losses(healthy(5), 4, dict.fromkeys(range(4), 9.0))))


def test_a_run_that_diverges_from_its_first_round_on_is_an_alarm() -> None:
    first = replace(healthy(1)[0], untrained_loss=math.log(256))
    assert not judge([first]).findings

    exploded = replace(first, losses=dict.fromkeys(first.losses, 20.0))

    judgement = judge([exploded])
    (finding,) = judgement.findings
    assert (finding.sign, finding.raises_alarm, finding.usual) == (Sign.LOSS, True, math.log(256))
    assert judgement.last_healthy == 0


def test_agreement_that_is_gone_for_two_rounds_is_an_alarm() -> None:
    def none(payload: PayloadFigures) -> PayloadFigures:
        return replace(payload, cosine=0.0)

    found = judged(with_payloads(healthy(14), 12, none))
    assert not any(each.alarm for each in found[:12])
    assert [(each.sign, each.value) for each in found[12].findings if each.raises_alarm] == [
        (Sign.AGREEMENT, 0.0)
    ]


def test_norms_and_error_feedback_that_jump_are_findings() -> None:
    def great(payload: PayloadFigures) -> PayloadFigures:
        return replace(payload, norm=100.0)

    def one_great(payload: PayloadFigures) -> PayloadFigures:
        return great(payload) if payload.owner == PEERS[3] else payload

    (all_great,) = judge(with_payloads(healthy(12), 12, great)).findings
    assert (all_great.sign, all_great.of_run, all_great.raises_alarm) == (Sign.NORM, True, False)
    assert (all_great.stages, round(all_great.value or 0.0)) == ((0, 1), 100)
    assert {each.peers for each in judge(with_payloads(healthy(12), 12, one_great)).findings} == {(PEERS[3],)}
    rounds = [replace(each, error_shares=(0.3,) * 4) for each in healthy(12)]
    rounds[-1] = replace(rounds[-1], error_shares=(0.9,) * 4)
    assert [each.sign for each in judge(rounds).findings] == [Sign.ERROR_FEEDBACK]
    rounds[-1] = replace(rounds[-1], error_shares=(0.45,) * 4)
    assert judge(rounds).findings == (), "a small step, although none came before it"


def test_norms_that_fall_are_a_finding_and_no_alarm() -> None:
    """They fall with the learning rate."""

    def small(payload: PayloadFigures) -> PayloadFigures:
        return replace(payload, norm=0.001)

    found = judged(with_payloads(healthy(14), 12, small))
    assert [each.sign for each in found[13].findings] == [Sign.NORM]
    assert not any(each.alarm for each in found)


@pytest.mark.parametrize("others", [PEERS[1:2], []])
def test_the_norm_of_one_of_two_payloads_raises_no_alarm(others: list[PeerId]) -> None:
    """Its owner may lie; also if nobody has measured the other one."""

    def of_two(rounds: list[MeasuredRound], owners: list[PeerId]) -> list[MeasuredRound]:
        def left(figures: MeasuredRound) -> MeasuredRound:
            payloads = tuple(each for each in figures.payloads if each.owner in owners)
            return replace(figures, payloads=payloads, contributors=frozenset(PEERS[:2]))

        return list(map(left, rounds))

    def great(payload: PayloadFigures) -> PayloadFigures:
        return replace(payload, norm=1e9) if payload.owner == PEERS[0] else payload

    rounds = with_payloads(healthy(14), 12, great)
    found = judged([*of_two(rounds[:11], PEERS[:2]), *of_two(rounds[11:], [PEERS[0], *others])])
    assert not any(each.alarm for each in found)
    assert found[-1].findings, "it is a finding"
    assert not any(each.peers for each in found[-1].findings), "one of two may be right"


RECORDED = [4.812, 4.806, 4.815, 4.809, 4.803, 4.818, 4.811, 4.807, 4.813, 4.81]
"""Losses of two small replicas before a member was banned; afterwards they were 12 % higher."""


def test_a_rise_of_losses_that_were_steady_is_no_alarm() -> None:
    rounds = steady([*RECORDED, *(1.12 * loss for loss in RECORDED)])
    assert not [each.findings for each in judged(rounds) if each.findings]
    assert not [each.findings for each in judged(without_peer(rounds, 11, PEERS[2])) if each.findings]


@pytest.mark.parametrize("is_changed", [False, True], ids=["same", "changed"])
def test_contributors_that_have_changed_widen_what_is_usual(is_changed: bool) -> None:
    rounds = steady([*RECORDED, 1.35 * 4.81])
    if is_changed:
        rounds = without_peer(rounds, 11, PEERS[2])
    assert bool(judge(rounds).alarm) is not is_changed


@pytest.mark.parametrize("is_changed", [False, True], ids=["same", "changed"])
def test_agreement_may_fall_further_among_other_contributors(is_changed: bool) -> None:
    """To less than a quarter of what was usual, and to more than an eighth of it."""

    def low(payload: PayloadFigures) -> PayloadFigures:
        return replace(payload, cosine=0.17 * (payload.cosine or 0.0))

    rounds = with_payloads(healthy(24), 21, low)
    if is_changed:
        others = frozenset(PeerId(f"other-{index}") for index in range(4))
        rounds = [replace(each, contributors=others) if each.round_number >= 21 else each for each in rounds]
    assert bool(alarms_of(judged(rounds), Sign.AGREEMENT)) is not is_changed


@pytest.mark.parametrize("is_changed", [False, True], ids=["same", "changed"])
def test_payloads_are_compared_with_those_of_the_same_settings(is_changed: bool) -> None:
    """With many times the steps, all norms are many times as large."""
    rounds = with_payloads(healthy(24), 21, lambda payload: replace(payload, norm=20 * payload.norm))
    if is_changed:
        rounds = [replace(each, changes=each.round_number // 21) for each in rounds]
    assert bool(alarms_of(judged(rounds), Sign.NORM)) is not is_changed


@pytest.mark.parametrize("is_other", [False, True], ids=["same", "other"])
def test_losses_are_compared_with_those_on_the_same_text(is_other: bool) -> None:
    """Text of another kind is harder to predict: a phase of the run is no accident."""
    rounds = with_losses(healthy(24), 12, dict.fromkeys(range(4), 4.5))
    rounds = [replace(each, untrained_loss=5.5) for each in rounds]
    if is_other:
        texts = [DataSpec(source=f"text:{name}").measured for name in "ab"]
        rounds = [replace(each, measured_on=texts[each.round_number // 12]) for each in rounds[:22]]
    assert bool(alarms_of(judged(rounds), Sign.LOSS)) is not is_other


@pytest.mark.parametrize("payloads", [2, 3])
def test_a_norm_is_compared_with_those_of_two_others_at_least(payloads: int) -> None:
    def large(payload: PayloadFigures) -> PayloadFigures:
        return replace(payload, norm=1e6 * payload.norm) if payload.owner == PEERS[0] else payload

    rounds = with_payloads(healthy(3), 3, large)
    for gone in PEERS[payloads:]:
        rounds = without_peer(rounds, 1, gone)
    named = {peer for each in judge(rounds).findings for peer in each.peers if each.sign is Sign.NORM}
    assert named == ({PEERS[0]} if payloads > 2 else set())


def doubled(rounds: list[MeasuredRound]) -> list[MeasuredRound]:
    return [
        replace(each, losses={index: 2 * loss for index, loss in each.losses.items()})
        if each.round_number >= 21
        else each
        for each in rounds
    ]


DIVERGENCES: dict[str, Callable[[list[MeasuredRound]], list[MeasuredRound]]] = {
    "loss": doubled,
    "no loss": lambda rounds: with_losses(rounds, 21, dict.fromkeys(range(4), math.nan)),
    "norm": lambda rounds: with_payloads(rounds, 21, lambda each: replace(each, norm=10 * each.norm)),
    "cosine": lambda rounds: with_payloads(rounds, 21, lambda each: replace(each, cosine=0.0)),
}


@pytest.mark.parametrize("what", DIVERGENCES)
@pytest.mark.parametrize("seed", range(5))
def test_a_run_that_diverges_is_an_alarm_within_two_rounds_also_if_a_peer_has_left(
    what: str, seed: int
) -> None:
    rounds = DIVERGENCES[what](healthy(22, seed))
    for each in (rounds, without_peer(rounds, 21, PEERS[2])):
        alarms = [found.round_number for found in judged(each) if found.alarm]
        assert alarms[:1] in ([21], [22])


def plausible_run(
    count: int, seed: int, noise: float, start: float, end: float, pace: float, rise: float, churn: float
) -> list[MeasuredRound]:
    """Losses fall, with noise, and are higher for 50 rounds after a change of peers; nothing is wrong."""
    chance, rounds, peers, changed_at = random.Random(seed), [], list(PEERS), 0
    for number in range(1, count + 1):
        if chance.random() < churn:
            peers[chance.randrange(len(peers))] = PeerId(f"newcomer-{number}")
            changed_at = number
        level = (end + (start - end) * math.exp(-number / pace)) * (
            rise if changed_at and number - changed_at < 50 else 1.0
        )
        losses = {index: level * (1 + chance.uniform(-noise, noise)) for index in range(len(peers))}
        weights = dict.fromkeys(losses, 1.0)
        rounds.append(MeasuredRound(number, weights, losses, contributors=frozenset(peers)))
    return rounds


PLAUSIBLE = {
    "seed": st.integers(0, 1000),
    "noise": st.floats(0, 0.05),
    "start": st.floats(3, 12),
    "end": st.floats(0.5, 3),
    "pace": st.floats(2, 300),
    "rise": st.floats(1, 1.12),
    "churn": st.sampled_from([0.0, 0.01, 0.2]),
}


def assert_nothing_is_found(rounds: list[MeasuredRound]) -> None:
    for count in range(1, len(rounds) + 1):
        assert not judge(rounds[max(0, count - WINDOW - 1) : count]).findings


@settings(max_examples=10)
@given(st.builds(plausible_run, st.just(1000), **PLAUSIBLE))
def test_plausible_losses_have_no_finding_in_1000_rounds(rounds: list[MeasuredRound]) -> None:
    assert_nothing_is_found(rounds)


@settings(max_examples=10)
@given(st.builds(plausible_run, st.just(60), **PLAUSIBLE), st.integers(0, 1000))
def test_plausible_payloads_have_no_finding(rounds: list[MeasuredRound], seed: int) -> None:
    noise = random.Random(seed)

    def varied(owner: PeerId, stage: int) -> PayloadFigures:
        cosine, norm = 0.1 * noise.uniform(0.7, 1.3), noise.uniform(0.7, 1.4)
        return PayloadFigures(stage, owner, is_full=True, cosine=cosine, norm=norm, mean_norm=0.5)

    assert_nothing_is_found(
        [
            replace(
                each, payloads=tuple(varied(owner, stage) for owner in each.contributors for stage in (0, 1))
            )
            for each in rounds
        ]
    )


def test_kinds_of_replicas_that_pull_against_each_other_are_a_finding() -> None:
    def apart(payload: PayloadFigures) -> PayloadFigures:
        return replace(payload, unlike=-0.08)

    found = judge(with_payloads(healthy(12), 1, apart)).findings
    assert {each.sign for each in found} == {Sign.KINDS}
    assert (found[0].stages, round(found[0].value or 0.0, 2)) == ((0,), -0.08)


ANY = st.floats(allow_nan=True, allow_infinity=True)
COSINES = st.none() | st.floats(-1, 1)
PAYLOADS = st.builds(
    PayloadFigures,
    stage=st.integers(0, 2),
    owner=st.sampled_from([PeerId("a"), PeerId("b"), PeerId("c")]),
    is_full=st.none() | st.booleans(),
    cosine=COSINES | ANY,
    norm=ANY,
    mean_norm=ANY,
    alike=COSINES | ANY,
    unlike=COSINES | ANY,
)
ROUNDS = st.builds(
    MeasuredRound,
    round_number=st.integers(0, 10**9),
    work=st.dictionaries(st.integers(0, 4), st.floats(0, 1e300), max_size=5),
    losses=st.dictionaries(st.integers(0, 4), ANY, max_size=5),
    payloads=st.lists(PAYLOADS, max_size=9).map(tuple),
    error_shares=st.lists(ANY, max_size=5).map(tuple),
)


@pytest.mark.parametrize("figure", [math.inf, 1.7e308])
def test_figures_that_cannot_be_added_do_not_raise(figure: float) -> None:
    def impossible(payload: PayloadFigures) -> PayloadFigures:
        return replace(payload, alike=figure if payload.is_full else -figure, unlike=figure)

    assert not judge(with_payloads(healthy(12), 1, impossible)).alarm


@given(st.lists(ROUNDS, min_size=1, max_size=12))
def test_no_figures_make_judging_raise(rounds: list[MeasuredRound]) -> None:
    found = judge(rounds)
    assert all(each.sentence.isprintable() and len(each.sentence) < 1000 for each in found.findings)


@pytest.mark.parametrize("turns", [1, 2])
def test_payloads_that_do_not_agree_any_more_raise_an_alarm_also_where_stages_exchange_in_turn(
    turns: int,
) -> None:
    def in_turn(each: MeasuredRound) -> MeasuredRound:
        turn = each.round_number % turns
        return replace(
            each, turn=turn, payloads=tuple(replace(payload, stage=turn) for payload in each.payloads)
        )

    def unlike(payload: PayloadFigures) -> PayloadFigures:
        return replace(payload, cosine=0.0)

    found = judged([in_turn(each) for each in with_payloads(healthy(40), 26, unlike)])
    assert not any(each.alarm for each in found[:25])
    assert alarms_of(found[25:30], Sign.AGREEMENT)
