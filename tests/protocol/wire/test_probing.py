"""The answers to a probe: what is answered, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import ErrorCode, HetnodeError
from protocol.pb import hetnode_pb2 as pb
from protocol.wire.probing import DATA_BYTES, MAX_DATA_BYTES, Answers, ProbeDoor

DATA = pb.ProbeMessage(data=bytes(DATA_BYTES))


def admit_data() -> None:
    """Data may move."""


def answers_at(now: Callable[[], float] = lambda: 0.0) -> Answers:
    return Answers(now, admit_data)


def refusal(answers: Answers, message: pb.ProbeMessage) -> ErrorCode:
    with pytest.raises(HetnodeError) as refused:
        list(answers.to(message))
    assert refused.value.remedy
    return refused.value.code


def test_a_tally_counts_the_bytes_since_the_last_tally() -> None:
    answers = answers_at()
    for _ in range(3):
        assert list(answers.to(DATA)) == []
    assert [each.tally for each in answers.to(pb.ProbeMessage(tally=0))] == [3 * DATA_BYTES]
    assert [each.tally for each in answers.to(pb.ProbeMessage(tally=0))] == [0]


@pytest.mark.parametrize("seconds", [0.0, -1.0, 3.1, math.inf, -math.inf, math.nan])
def test_a_fill_has_bounds(seconds: float) -> None:
    assert refusal(answers_at(), pb.ProbeMessage(fill=seconds)) is ErrorCode.BAD_REQUEST


def test_the_data_of_a_fill_is_bounded_for_any_clock() -> None:
    answers = answers_at(lambda: 0.0)  # it stands still
    sent = 0
    for _ in range(3):
        *data, tally = answers.to(pb.ProbeMessage(fill=1.0))
        assert tally.tally == sum(len(each.data) for each in data)
        sent += tally.tally
    assert sent == MAX_DATA_BYTES


def test_the_total_of_all_fills_of_a_probe_is_bounded() -> None:
    now = 0.0

    def ticking() -> float:
        nonlocal now
        now += 0.1
        return now

    answers = answers_at(ticking)
    for _ in range(3):
        list(answers.to(pb.ProbeMessage(fill=1.0)))
    assert refusal(answers, pb.ProbeMessage(fill=0.1)) is ErrorCode.RATE_LIMITED


def test_data_is_admitted_once_and_echoes_always() -> None:
    asked = []
    answers = Answers(lambda: 0.0, lambda: asked.append(True))
    list(answers.to(pb.ProbeMessage(echo=1)))
    assert not asked
    list(answers.to(DATA))
    list(answers.to(pb.ProbeMessage(fill=1.0)))
    assert asked == [True]


def test_the_data_that_a_caller_sends_is_bounded() -> None:
    answers = answers_at()
    for _ in range(MAX_DATA_BYTES // DATA_BYTES):
        list(answers.to(DATA))
    assert refusal(answers, DATA) is ErrorCode.RATE_LIMITED


def test_the_size_of_a_data_message_is_bounded() -> None:
    assert refusal(answers_at(), pb.ProbeMessage(data=bytes(DATA_BYTES + 1))) is ErrorCode.BAD_REQUEST


def test_the_number_of_messages_of_a_probe_is_bounded() -> None:
    answers = answers_at()
    for number in range(1000):
        assert list(answers.to(pb.ProbeMessage(echo=number))) == [pb.ProbeMessage(echo=number)]
    assert refusal(answers, pb.ProbeMessage(echo=1)) is ErrorCode.RATE_LIMITED


MESSAGES = st.one_of(
    st.builds(pb.ProbeMessage, hello=st.sampled_from(["me", "", "x" * 100])),
    st.builds(pb.ProbeMessage, echo=st.integers(0, 2**64 - 1)),
    st.builds(pb.ProbeMessage, data=st.binary(max_size=100)),
    st.builds(pb.ProbeMessage, tally=st.integers(0, 2**64 - 1)),
    st.builds(pb.ProbeMessage, fill=st.floats()),
    st.just(pb.ProbeMessage()),
)


@given(st.lists(MESSAGES, max_size=20))
def test_any_messages_of_a_caller_are_answered_or_refused(messages: list[pb.ProbeMessage]) -> None:
    answers, sent = answers_at(), 0
    try:
        for message in messages:
            sent += sum(len(reply.data) for reply in answers.to(message))
    except HetnodeError as error:
        assert error.code in (ErrorCode.BAD_REQUEST, ErrorCode.RATE_LIMITED)  # noqa: PT017
    assert sent <= MAX_DATA_BYTES


def test_the_number_and_frequency_of_probes_are_bounded() -> None:
    now = 0.0
    door = ProbeDoor(2, lambda: now)

    def enter(caller: str) -> ErrorCode | None:
        with ExitStack() as stack:
            try:
                stack.enter_context(door.one_more(caller))
            except HetnodeError as error:
                return error.code
        return None

    with door.one_more("a"):
        assert enter("a") is ErrorCode.RATE_LIMITED
        assert enter("b") is None
        with door.one_more("b"):
            assert enter("c") is ErrorCode.RATE_LIMITED
    turns = [enter("a") for _ in range(20)]
    assert turns[0] is None
    assert turns[-1] is ErrorCode.RATE_LIMITED
    now += 60
    assert enter("a") is None


def moves_data(door: ProbeDoor, caller: str) -> bool:
    with door.one_more(caller) as admit_data:
        try:
            admit_data()
        except HetnodeError as error:
            return error.code is not ErrorCode.RATE_LIMITED
    return True


def test_a_caller_may_move_data_a_few_times_and_then_rarely() -> None:
    now = 0.0
    door = ProbeDoor(2, lambda: now)
    moved = 0
    for _ in range(20 * 60):
        now += 60
        moved += moves_data(door, "a")
    assert moved <= 3 + 20 * 60 / 5
    assert moves_data(door, "b"), "the limit is for each caller"


def test_a_busy_peer_answers_only_echoes() -> None:
    door = ProbeDoor(2, lambda: 0.0)
    door.is_busy = lambda: True
    for _ in range(3):
        assert not moves_data(door, "a")
    door.is_busy = lambda: False
    assert moves_data(door, "a")
