"""Answers that take long are shared by all who ask in a while."""

from __future__ import annotations

from coordinator.api.spared_answer import SparedAnswer


class Slow:
    """Counts how often it is asked, which takes `seconds`."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.now, self.asked = seconds, 0.0, 0
        self.answer = SparedAnswer(self._compute, lambda: self.now, lambda: self.now)

    def _compute(self) -> int:
        self.asked += 1
        self.now += self.seconds
        return self.asked


def test_a_slow_answer_takes_a_twentieth_of_the_time() -> None:
    slow = Slow(0.07)
    while slow.now < 100.0:
        slow.answer.read()
        slow.now += 0.01
    assert slow.asked * slow.seconds < 100.0 / 20


def test_a_slow_answer_is_told_anew_after_a_while() -> None:
    slow = Slow(0.07)
    assert [slow.answer.read(), slow.answer.read()] == [1, 1]
    slow.now += 20 * slow.seconds
    assert slow.answer.read() == 2
