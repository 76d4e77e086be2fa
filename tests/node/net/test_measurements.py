"""Measurements are told in order, and a slow answer does not hold the training up."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from node.net.measurements import ANSWER_SECONDS, Measurements
from node.net.spreading import PEERS_PER_SECOND
from protocol.errors import ErrorCode, HetnodeError
from protocol.status import Measurement
from tests.virtual.loop import elapsed, run


class Coordinator:
    """Answers each measurement after so many seconds, or with an error."""

    def __init__(self, *answers: float | Exception) -> None:
        self.heard: list[Any] = []
        self._answers = iter(answers)

    async def measure(self, measured: Measurement) -> None:
        answer = next(self._answers)
        if isinstance(answer, Exception):
            raise answer
        await asyncio.sleep(answer)
        self.heard.append(measured)


def measurement(name: str) -> Any:
    return name


def test_a_slow_answer_holds_the_training_up_for_a_second_at_most() -> None:
    async def main() -> None:
        coordinator = Coordinator(0.1, 8.0, 0.1)
        measurements = Measurements(coordinator.measure, lambda: 0)
        await measurements.tell(measurement("first"))
        assert elapsed() == pytest.approx(0.1)
        await measurements.tell(measurement("second"))
        assert elapsed() == pytest.approx(0.1 + ANSWER_SECONDS)
        assert coordinator.heard == ["first"]
        await measurements.tell(measurement("third"))
        assert coordinator.heard == ["first", "second", "third"]
        assert elapsed() == pytest.approx(0.1 + 8.0 + 0.1)

    run(main())


def test_a_refusal_is_raised_once_at_once_or_by_the_next_measurement() -> None:
    async def main() -> None:
        refusal = HetnodeError(ErrorCode.UNKNOWN_PEER, "", "")
        measurements = Measurements(Coordinator(refusal, 0.0).measure, lambda: 0)
        with pytest.raises(HetnodeError):
            await measurements.tell(measurement("first"))
        await measurements.tell(measurement("second"))
        await measurements.told()

    run(main())


def test_what_is_dropped_is_told_no_further() -> None:
    async def main() -> None:
        coordinator = Coordinator(8.0)
        measurements = Measurements(coordinator.measure, lambda: 0)
        await measurements.tell(measurement("first"))
        measurements.drop()
        await measurements.told()
        await asyncio.sleep(10)
        assert coordinator.heard == []

    run(main())


def test_members_of_a_large_swarm_wait_for_no_answer_and_tell_one_after_the_other() -> None:
    async def main() -> None:
        coordinator = Coordinator(*200 * (0.1,))
        members = [Measurements(coordinator.measure, lambda: 1000) for _ in range(200)]
        await asyncio.gather(*(each.tell(measurement("of a round")) for each in members))
        assert elapsed() <= ANSWER_SECONDS
        await asyncio.gather(*(each.told() for each in members))
        assert coordinator.heard == 200 * ["of a round"]
        assert 0.5 * 1000 / PEERS_PER_SECOND < elapsed() < 0.1 + 1000 / PEERS_PER_SECOND

    run(main())
