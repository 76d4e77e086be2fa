"""Events as answers, questions that have none, and what every answer reads."""

from __future__ import annotations

import pytest

from coordinator.run.state import events
from coordinator.run.state.commands import (
    RaiseAlarm,
)
from protocol.errors import ErrorCode, HetnodeError
from protocol.types import Reachability
from tests.support.coordinator_run import (
    play_rounds,
    started,
    started_and_attested,
)
from tests.support.explaining import text_of
from tests.support.explaining_runs import A, asked, usual_rounds


class TestEvents:
    def test_what_an_event_says_with_its_time(self) -> None:
        run = started(3, rounds=20)
        found = asked(run)("event 1, 2")
        assert [each.events for each in found.sentences] == [(1,), (2,)]
        assert found.sentences[0].text == "1970-01-01 00:16:40 UTC: the coordinator listens."

    @pytest.mark.parametrize(
        "question",
        [
            "0",
            "7",
            "99999999999",
            "event 0",
            "event 1000000",
            f"event {' 1' * 65}x",
            "Qm",
            "..",
            "nobody",
            "é" * 10_000,
            "event",
            "-1",
        ],
    )
    def test_what_is_not_there_is_one_message(self, question: str) -> None:
        run = started(3, rounds=20)
        with pytest.raises(HetnodeError) as refusal:
            asked(run)(question)
        assert refusal.value.code is ErrorCode.BAD_OPTION
        assert len(refusal.value.cause) < 300


def test_a_question_reads_only_its_rounds() -> None:
    run = started(3, rounds=60)
    usual_rounds(run, 30)
    ask = asked(run)
    ask(20)
    decided = [
        number
        for number, event in enumerate(ask.log, start=1)
        if isinstance(event, events.RoundCommitted) and event.decision.round_number in (15, 20)
    ]
    assert min(decided) <= min(ask.read_numbers)
    assert max(ask.read_numbers) == max(decided)


def test_a_very_long_round_is_read_from_its_end() -> None:
    run = started(3, rounds=20)
    for _ in range(11_000):
        run.events.append(events.AddressesChanged(run.now, A.peer, "h:1", Reachability.OPEN, "h:1", ""))
    usual_rounds(run, 1)
    ask = asked(run)
    assert len(ask(1).sentences) < 33


def test_an_alarm_is_in_the_answers() -> None:
    run = started_and_attested(2, rounds=9)
    play_rounds(run, 2)
    run.accept(RaiseAlarm(2, 1, "the loss rose to 9.0.", False))
    ask = asked(run)
    assert "There is an alarm: the loss rose to 9.0. The last healthy round was 1" in text_of(ask("now"))
    assert "An alarm was raised about round 2: the loss rose to 9.0." in text_of(ask(3))
    assert isinstance(ask.cited(ask(3), "An alarm was raised")[0], events.AlarmRaised)
