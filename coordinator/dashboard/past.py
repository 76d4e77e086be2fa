"""The past of the run as JSON, from its history. All of it waits for a disk: it is for threads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from coordinator.dashboard.run_record import Record, finite
from coordinator.dashboard.text import shown
from coordinator.history.peer_records import CreditOrder
from coordinator.history.queries import History
from coordinator.history.records import LossPoint, Page
from coordinator.state.state import State
from protocol.errors import ErrorCode, HetnodeError
from protocol.types import PeerId

MOST_LOSS_REPLICAS = 12
"""Of more replicas, the first ones are shown, and the mean of all."""
_POINTS = 500
_ROUNDS, _CREDITS, _OF_PEER = 50, 100, 60
_MOST_LETTERS_OF_PEER = 128
_LONG = 1000


def plain(value: Any) -> Any:
    """A record as JSON: text is cut and made printable, figures that are not finite are null."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, str):
        return shown(value)
    if isinstance(value, float):
        return finite(value)
    if is_dataclass(value):
        return {each.name: plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, tuple | list):
        return [plain(each) for each in value]
    return value


class Past:
    """Answers requests about the past. `options` are those of a URL: all text, and none of it is trusted.

    Every method raises HetnodeError: NO_HISTORY, and BAD_REQUEST for options that mean nothing.

    Args:
        state: of the run, as it is now.
    """

    def __init__(self, history: History, state: Callable[[], State]) -> None:
        self._history, self._state = history, state

    def losses(self, options: Mapping[str, str]) -> Record:
        """Of the first replicas, and the mean of all."""
        replicas = self._history.replicas(Page(most=MOST_LOSS_REPLICAS + 1))
        shown_replicas = replicas[:MOST_LOSS_REPLICAS]
        count = len(replicas)
        if count > MOST_LOSS_REPLICAS:
            count = len(self._history.replicas(Page(most=1000)))
        return {
            "replica_count": count,
            "mean": _points(self._history.losses(None, _POINTS)),
            "replicas": [
                {"replica": each.replica, "points": _points(self._history.losses(each.replica, _POINTS))}
                for each in shown_replicas
            ],
        }

    def speed(self, options: Mapping[str, str]) -> Record:
        """Committed tokens per second."""
        return {"points": plain(self._history.speed(_POINTS))}

    def traffic(self, options: Mapping[str, str]) -> Record:
        """Of all members, by round."""
        points = self._history.traffic(None, None, _POINTS)
        return {"points": [{"round": each.round_number, **plain(each.traffic)} for each in points]}

    def rounds(self, options: Mapping[str, str]) -> Record:
        """A page of rounds, the newest first."""
        before = _number(options, "before", 0) or None
        rounds, restored = self._history.rounds(before, _ROUNDS), self._state().restored
        numbers = [each.round_number for each in rounds]
        return {
            "rounds": plain(rounds),
            "stages": self._state().stages,
            "restored": {number: restored[number] for number in numbers if number in restored},
        }

    def round(self, options: Mapping[str, str]) -> Record:
        """All about one round."""
        number = _number(options, "round", 0)
        found = self._history.round(number)
        if found is None:
            raise HetnodeError(ErrorCode.BAD_REQUEST, "This round has not begun.", "")
        state = self._state()
        alarm = state.alarm.reason if state.alarm and state.alarm.round_number == number else ""
        return {
            **plain(found),
            "restores": state.restored.get(number),
            "alarm": shown(alarm, _LONG),
            "problem": shown(self._history.problem),
        }

    def peer(self, options: Mapping[str, str]) -> Record:
        """All about one peer; the history is null if it has never joined."""
        peer = PeerId(options.get("peer", "")[:_MOST_LETTERS_OF_PEER])
        return {"past": plain(self._history.peer(peer, _OF_PEER))}

    def credits(self, options: Mapping[str, str]) -> Record:
        """A page of the credits of all peers."""
        try:
            order = CreditOrder(options.get("order", CreditOrder.TOKENS.value))
        except ValueError:
            raise HetnodeError(ErrorCode.BAD_REQUEST, "There is no such order.", "") from None
        skip = _number(options, "skip", 0)
        page = plain(self._history.credits(order, Page(skip, _CREDITS)))
        names = self._state().names
        for each in page["credits"]:
            each["name"] = shown(names.get(each["peer"]) or "")
        return {**page, "skip": skip, "most": _CREDITS}


def _points(points: tuple[LossPoint, ...]) -> list[Record]:
    return [
        {
            "round": each.round_number,
            "at": each.at,
            "validation_loss": each.validation_loss,
            "train_loss": each.train_loss,
        }
        for each in points
    ]


def _number(options: Mapping[str, str], name: str, default: int) -> int:
    text = options.get(name, "")
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise HetnodeError(ErrorCode.BAD_REQUEST, f"'{name}' is no number.", "")
    return int(text)
