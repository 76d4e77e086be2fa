"""The hours of the day in which a node may take part, by the clock on the wall of its machine."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, time

from node.home.guest.guest import Rest
from protocol.errors import ErrorCode, HetnodeError

_DAY = 24 * 60
_RANGE = re.compile(r"(\d{1,2}):(\d\d)-(\d{1,2}):(\d\d)", re.ASCII)


@dataclass(frozen=True)
class Range:
    """From minute `begin` of the day until before minute `end`; over midnight where `end` is not later."""

    begin: int
    end: int

    def __contains__(self, minute: int) -> bool:
        if self.begin < self.end:
            return self.begin <= minute < self.end
        return minute >= self.begin or minute < self.end

    def __str__(self) -> str:
        return "-".join(f"{minute // 60:02}:{minute % 60:02}" for minute in (self.begin, self.end))


@dataclass(frozen=True)
class Hours:
    """Ranges of the day. A time is looked up as the clock on the wall shows it.

    No duration is ever computed, so a change to or from summer time needs no rule: a range begins when the
    clock shows its start, and lasts an hour less or more in that night.
    """

    ranges: tuple[Range, ...]

    def contain(self, at: time) -> bool:
        return any(at.hour * 60 + at.minute in each for each in self.ranges)

    def __str__(self) -> str:
        return ",".join(map(str, self.ranges))


def parse_hours(text: str) -> Hours:
    """Hours such as "22:00-07:00,12:00-13:30". Raises HetnodeError BAD_OPTION."""
    return Hours(tuple(_parse_range(each.strip(), text) for each in text.split(",")))


def _parse_range(each: str, text: str) -> Range:
    match = _RANGE.fullmatch(each)
    begin, end = (60 * int(match[i]) + int(match[i + 1]) for i in (1, 3)) if match else (0, 0)
    minutes_fit = match is not None and int(match[2]) < 60 and int(match[4]) < 60
    if not minutes_fit or begin >= _DAY or end > _DAY or begin == end:
        raise HetnodeError(
            ErrorCode.BAD_OPTION,
            f"--hours '{text:.80}' is not a range of hours of a day.",
            "Write them like 22:00-07:00, several with commas: 22:00-07:00,12:00-13:30.",
        )
    return Range(begin, end)


@dataclass(frozen=True)
class HoursRule:
    """Lets the node take part in `hours` only. `now` is the local time; `patience` as in :class:`Rest`."""

    hours: Hours
    patience: float
    now: Callable[[], datetime] = datetime.now

    def rest(self) -> Rest | None:
        if self.hours.contain(self.now().time()):
            return None
        return Rest(f"it is outside its hours, {self.hours}", self.patience)
