"""A node waits for a coordinator that does not answer, and for room in an open run, and says so."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from typing import TypeVar

from node.net.coordinator_client import CoordinatorClient
from node.net.membership import TEMPORARY, jittered, until_answered
from protocol.errors import ErrorCode, HetnodeError

log = logging.getLogger(__name__)
T = TypeVar("T")

_FIRST_SECONDS, _ATTEMPT_SECONDS = 3.0, 15.0
"""How long the first attempt may take, so that a person soon sees why nothing happens; and later ones."""
_RETRY_SECONDS = 2.0
_REST_SECONDS = 30.0
"""Between two attempts of a node that rests."""
_TURN_SECONDS = 30.0
"""Between two questions of a node that has a place in the waiting list."""
_LEAST_SILENCE, _MOST_SILENCE = 10.0, 600.0
"""Seconds between two messages; they grow with the time waited."""


class CoordinatorWait:
    """Repeats the first calls of a node until its coordinator answers.

    Args:
        seconds: raise the last error after this time; None waits without end.

    Attributes:
        is_waiting: no answer has come to the current call, and its first attempt has failed.
        place: of this node in the waiting list of an open run, with an estimate; "" while it has none.
    """

    def __init__(self, seconds: float | None) -> None:
        self._seconds = math.inf if seconds is None else seconds
        self.is_waiting = False
        self.place = ""

    async def turn(self, call: Callable[[], Awaitable[T]]) -> T:
        """The result of `call`, repeated until an open run has room for this node.

        Raises every error of `call` but WAITING_LIST.
        """
        while True:
            try:
                answer = await call()
            except HetnodeError as error:
                if error.code is not ErrorCode.WAITING_LIST:
                    raise
                former, self.place = self.place, error.cause.rstrip(".")
                # The estimate changes all the time.
                if _place_alone(former) != _place_alone(self.place):
                    log.info("waiting for room in the run: %s. %s", self.place, error.remedy)
            else:
                if self.place:
                    log.info("the run has room for this node")
                self.place = ""
                return answer
            await asyncio.sleep(jittered(_TURN_SECONDS))

    async def answer(self, call: Callable[[float], Awaitable[T]]) -> T:
        """The result of `call`, which gets the seconds that it may take, repeated while that may help.

        Raises every error of `call` but COORDINATOR_UNREACHABLE and RATE_LIMITED at once.
        """
        clock = asyncio.get_running_loop().time
        began, next_report, attempt_seconds = clock(), 0.0, _FIRST_SECONDS
        while True:
            try:
                answer = await call(min(attempt_seconds, max(0.1, began + self._seconds - clock())))
            except HetnodeError as error:
                waited = clock() - began
                if error.code not in TEMPORARY or waited + _RETRY_SECONDS > self._seconds:
                    raise
                self.is_waiting, attempt_seconds = True, _ATTEMPT_SECONDS
                if waited >= next_report:
                    _report(error, waited)
                    next_report = waited + min(max(_LEAST_SILENCE, waited), _MOST_SILENCE)
            else:
                if self.is_waiting:
                    log.info("the coordinator answers after %s", span(clock() - began))
                self.is_waiting = False
                return answer
            # Many nodes may wait for the same coordinator.
            await asyncio.sleep(jittered(_RETRY_SECONDS))


async def until_run_is_over(coordinator: CoordinatorClient) -> None:
    """Wait until the run is over, while this node takes no part in it.

    A coordinator that is away is asked again. Raises HetnodeError if it refuses this node.
    """
    await until_answered(
        coordinator.until_over, _REST_SECONDS, lambda error: log.debug("%s", error), TEMPORARY
    )


def span(seconds: float) -> str:
    """Such as "42 s", "3 min" or "2.5 h"."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"


def _place_alone(place: str) -> str:
    """Such as "place 3" of "place 3 of 12 in the waiting list, about 40 min at the present pace"."""
    return place.partition(" of ")[0]


def _report(error: HetnodeError, waited: float) -> None:
    remedy = f"{error.remedy} This command goes on by itself when the coordinator answers; Ctrl-C ends it."
    log.warning("waiting for the coordinator, %s so far: %s %s", span(waited), error.cause, remedy)
