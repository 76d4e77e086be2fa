"""What members tell of the model counts once for each name and round, within bounds."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.membership import evaluations
from coordinator.run.state.apply import replay
from coordinator.run.state.commands import Ban
from coordinator.run.state.events import ModelEvaluated
from coordinator.run.state.records import OpenPlace
from coordinator.run.state.state import State
from coordinator.status.run_status import run_status
from protocol.errors import ErrorCode
from protocol.status import ModelEvaluation, ModelSample
from protocol.types import PeerId
from tests.builders import keyed
from tests.support.coordinator_run import Run, play_round, started

A, B, STRANGER = keyed(0), keyed(1), keyed(9)
OPERATOR = PeerId("")


def told(
    round_number: int = 1, name: str = "wiki", peer: PeerId = A.peer, loss: float = 3.0
) -> ModelEvaluation:
    return ModelEvaluation(peer, round_number, name, {"loss": loss})


def after_rounds(count: int) -> Run:
    run = started(2, rounds=count + 2)
    for _ in range(count):
        play_round(run)
    return run


def test_each_name_and_round_of_a_peer_counts_once_and_all_follows_from_the_log() -> None:
    run = after_rounds(3)
    for each in (told(1), told(1, loss=9.0), told(3), told(2), told(2, "code"), told(3, peer=OPERATOR)):
        run.accept(each)
    kept = [each.evaluation for each in run.events if isinstance(each, ModelEvaluated)]
    assert kept == [told(1), told(3), told(2, "code"), told(3, peer=OPERATOR)]
    found = run_status(run.state, (), run.now, run.now).evaluations
    assert found == (told(3, peer=OPERATOR), told(3), told(2, "code"))
    assert replay(State(run.spec, run.spec.name), run.events).evaluations == run.state.evaluations
    run.accept(Ban(A.peer, "noise"))
    assert run_status(run.state, (), run.now, run.now).evaluations == (told(3, peer=OPERATOR),)


def test_a_status_has_the_newest_samples_alone_first_those_of_the_operator() -> None:
    run = after_rounds(1)
    samples = (ModelSample("", "x" * 1000),) * 8
    for each in (told(), told(0, "code"), told(1, "prompts", OPERATOR)):
        run.accept(replace(each, samples=samples))
    found = run_status(run.state, (), run.now, run.now).evaluations
    assert found == (
        replace(told(1, "prompts", OPERATOR), samples=samples),
        told(),
        told(0, "code"),
    )


def test_who_has_not_joined_is_banned_or_does_not_count_yet_tells_nothing() -> None:
    run = after_rounds(1)
    run.state = replace(
        run.state, open_places={B.peer: OpenPlace(0.0, 0.0, "s", True)}, discounted=frozenset((B.peer,))
    )
    for peer, code in ((STRANGER.peer, ErrorCode.UNKNOWN_PEER), (B.peer, ErrorCode.UNKNOWN_PEER)):
        run.refuse(told(peer=peer), code)
    run.accept(Ban(A.peer, "noise"))
    run.refuse(told(), ErrorCode.BANNED)


@pytest.mark.parametrize(
    "wrong",
    [
        told(2),
        told(-1),
        told(name=""),
        told(name="n" * 81),
        told(name="a\x1b[31m"),
        told(loss=math.inf),
        told(loss=math.nan),
        replace(told(), figures={"a\nb": 1.0}),
        replace(told(), figures={str(i): 1.0 for i in range(17)}),
        replace(told(), samples=(ModelSample("", "x"),) * 9),
        replace(told(), samples=(ModelSample("", "x" * 1001),)),
        replace(told(), samples=(ModelSample("p\u202e", "x"),)),
    ],
)
def test_what_is_out_of_bounds_is_refused_and_changes_nothing(wrong: ModelEvaluation) -> None:
    run = after_rounds(1)
    before = run.state
    run.refuse(wrong, ErrorCode.BAD_REQUEST)
    assert run.state == before


def test_a_peer_tells_of_a_bounded_number_of_names() -> None:
    run = after_rounds(2)
    for number in range(evaluations.MOST_NAMES):
        run.accept(told(1, f"set {number}"))
    run.refuse(told(1, "one more"), ErrorCode.BAD_REQUEST)
    run.accept(told(2, "set 0"))
    run.accept(told(2, "one more", OPERATOR))


@given(
    st.integers(-9, 9), st.text(), st.dictionaries(st.text(), st.floats()), st.lists(st.text(), max_size=20)
)
def test_whatever_is_told_never_raises_anything_else(
    number: int, name: str, figures: dict[str, float], texts: list[str]
) -> None:
    run = started(2)
    samples = tuple(ModelSample(text, text) for text in texts)
    outcome = run.send(ModelEvaluation(A.peer, number, name, figures, samples))
    assert (outcome.refusal is None) == bool(outcome.events)
