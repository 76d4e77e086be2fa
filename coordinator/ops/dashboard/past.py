"""The past of the run as JSON, from its history. All of it waits for a disk: it is for threads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from coordinator.ops.dashboard.queries import Record, shown
from coordinator.run.state.state import State
from coordinator.status import document
from coordinator.store.history import SqliteHistory
from coordinator.store.history_answers import CreditOrder, LossPoint, Page, PeerDetail, RoundDetail
from coordinator.store.history_tables import Contribution, MemberFigures
from coordinator.store.omissions import why_not
from protocol.errors import ErrorCode, HetnodeError
from protocol.types import PeerId

MOST_LOSS_REPLICAS = 12
"""Of more replicas, the first ones are shown, and the mean of all."""
_POINTS = 500
_ROUNDS, _CREDITS, _OF_PEER = 50, 100, 60
_MOST_LETTERS_OF_PEER = 128
_LONG = 1000
_SAMPLED_ROUNDS = 10


def plain(value: Any) -> Any:
    """A record as JSON: text is cut and made printable, figures that are not finite are null."""
    return document.plain(value, shown)


class Past:
    """Answers requests about the past. `options` are those of a URL: all text, and none of it is trusted.

    Every method raises HetnodeError: NO_HISTORY, and BAD_REQUEST for options that mean nothing.

    Args:
        state: of the run, as it is now.
    """

    def __init__(self, history: SqliteHistory, state: Callable[[], State]) -> None:
        self._history, self._state = history, state

    def losses(self, options: Mapping[str, str]) -> Record:
        """Of the first replicas, and the mean of all."""
        replicas = self._history.replicas()
        return {
            "replica_count": len(replicas),
            "mean": _points(self._history.losses(None, _POINTS)),
            "replicas": [
                {"replica": each, "points": _points(self._history.losses(each, _POINTS))}
                for each in replicas[:MOST_LOSS_REPLICAS]
            ],
        }

    def speed(self, options: Mapping[str, str]) -> Record:
        """Committed tokens per second."""
        return {"points": plain(self._history.speed(_POINTS))}

    def traffic(self, options: Mapping[str, str]) -> Record:
        """Of all members, by round."""
        points = self._history.traffic(_POINTS)
        return {"points": [{"round": each.round_number, **plain(each)} for each in points]}

    def evaluations(self, options: Mapping[str, str]) -> Record:
        """A line of points for each name, metric and peer, and the newest samples."""
        excluded, points = self._state().excluded, defaultdict[tuple[str, str, PeerId], list[Record]](list)
        for each in self._history.evaluations(_POINTS):
            point = {"round": each.round_number, "at": each.at, "value": each.value}
            points[each.name, each.metric, each.peer].append(point)
        lines = [
            {"name": shown(name), "metric": shown(metric), "peer": peer, "points": found}
            for (name, metric, peer), found in points.items()
            if peer not in excluded
        ]
        samples = [each for each in self._history.samples(_SAMPLED_ROUNDS) if each.peer not in excluded]
        return {"lines": lines, "samples": [document.plain(each, _lines) for each in samples]}

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
            **_round(found),
            "restores": state.restored.get(number),
            "alarm": shown(alarm, _LONG),
            "problem": shown(self._history.problem),
        }

    def peer(self, options: Mapping[str, str]) -> Record:
        """All about one peer; the history is null if it has never joined."""
        peer = PeerId(options.get("peer", "")[:_MOST_LETTERS_OF_PEER])
        found = self._history.peer(peer, _OF_PEER)
        return {"past": _peer(found) if found else None}

    def credits(self, options: Mapping[str, str]) -> Record:
        """A page of the credits of all peers, or of those whose name or id has the text `find`."""
        try:
            order = CreditOrder(options.get("order", CreditOrder.TOKENS.value))
        except ValueError:
            raise HetnodeError(ErrorCode.BAD_REQUEST, "There is no such order.", "") from None
        skip = _number(options, "skip", 0)
        find = options.get("find", "").strip(" .…")[:_MOST_LETTERS_OF_PEER]  # ids are shown as ..END
        page = plain(self._history.credits(order, Page(skip, _CREDITS), find))
        return {**page, "skip": skip, "most": _CREDITS}


def _lines(text: str) -> str:
    return "\n".join(map(shown, text.split("\n")))


def _round(found: RoundDetail) -> Record:
    return {
        "summary": plain(found.summary),
        "stages": [
            {
                "summary": plain(each.summary),
                "phases": plain(each.phases),
                "contested": each.summary.contested,
                "contributions": [
                    _contribution(part, each.summary.reason or "") for part in each.contributions
                ],
            }
            for each in found.stages
        ],
        "members": [_figures(each) for each in found.members],
    }


def _peer(found: PeerDetail) -> Record:
    return {
        "summary": {**plain(found.summary), "credit": plain(found.credit)},
        "changes": plain(found.changes),
        "contributions": [_contribution(each) for each in found.contributions],
        "figures": [_figures(each) for each in found.figures],
        "estimates": plain(found.estimates),
    }


def _contribution(part: Contribution, decision: str = "") -> Record:
    """`decision`: the reason of the decision, if that is shown beside it."""
    return {**plain(part), "reason": shown(why_not(part, decision))}


def _figures(figures: MemberFigures) -> Record:
    return {**plain(figures), "error_share": figures.error_share}


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
