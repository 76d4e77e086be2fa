"""The past of a run as JSON."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest

from coordinator.ops.dashboard.past import MOST_LOSS_REPLICAS, Past, plain
from coordinator.ops.dashboard.queries import Queries
from coordinator.run.state.state import State
from coordinator.store.history import SqliteHistory
from coordinator.store.history_answers import CreditOrder, LossPoint, Page
from coordinator.store.history_tables import Contribution, Kind, Omission, StageOutcome, StageRow, Standing
from coordinator.store.omissions import why_not
from protocol.errors import ErrorCode, HetnodeError
from protocol.types import PeerId
from tests.builders import spec_of


class Told:
    """Stands where a history does."""

    def __init__(self, replicas: int = 2) -> None:
        self._replicas = replicas
        self.asked: list[tuple[Any, ...]] = []

    def replicas(self) -> tuple[int, ...]:
        return tuple(range(self._replicas))

    def losses(self, replica: int | None, most: int) -> tuple[LossPoint, ...]:
        return (LossPoint(1, 10.0, 5.0, None, 4.0, 6.0),)

    def round(self, number: int) -> None:
        self.asked.append(("round", number))

    def rounds(self, before: int | None, most: int) -> None:
        self.asked.append(("rounds", before, most))
        raise HetnodeError(ErrorCode.NO_HISTORY, "gone", "")

    def credits(self, order: CreditOrder, page: Page, find: str) -> None:
        self.asked.append(("credits", order, page, find))
        raise HetnodeError(ErrorCode.NO_HISTORY, "gone", "")


def past_of(told: Told) -> Past:
    return Past(cast(SqliteHistory, told), lambda: State(spec_of(), "run"))


def test_records_become_json() -> None:
    summary = StageRow(1, 0, StageOutcome.COMMITTED, reason="<b>\x1b" + "x" * 100_000)
    found = plain((summary, float("nan")))
    assert found[0]["outcome"] == "committed"
    assert len(found[0]["reason"]) <= 400
    assert found[1] is None
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize(
    ("standing", "cause", "culprit", "text"),
    [
        (Standing.COUNTED, None, None, ""),
        (Standing.LEFT_OUT, Omission.DECISION, "a", "of the decision"),
        (Standing.LEFT_OUT, Kind.REJECTED, "a", "1 member of the group rejected its payload: words"),
        (Standing.MISSING, Omission.NO_OFFER, None, "no offer came before the round closed"),
        (Standing.MISSING, Kind.LOST, "a", "words"),
        (Standing.MISSING, Kind.LOST, "b", "its replica lacked ..b: words"),
    ],
)
def test_a_sentence_says_why_a_payload_is_not_counted(
    standing: Standing, cause: str | None, culprit: str | None, text: str
) -> None:
    peer = PeerId(culprit) if culprit else None
    detail = None if cause == Omission.NO_OFFER else "words"
    part = Contribution(1, 0, PeerId("a"), 0, standing, cause=cause, culprit=peer, detail=detail)
    assert why_not(part, "of the decision") == text


def test_losses_of_few_replicas_are_all_shown() -> None:
    found = past_of(Told()).losses({})
    assert [each["replica"] for each in found["replicas"]] == [0, 1]
    assert found["replica_count"] == 2
    assert found["mean"][0]["validation_loss"] == 5.0


def test_of_many_replicas_the_first_are_shown() -> None:
    found = past_of(Told(100)).losses({})
    assert len(found["replicas"]) == MOST_LOSS_REPLICAS
    assert found["replica_count"] == 100


@pytest.mark.parametrize("given", ["-1", "1e9", "9" * 40, "\u0663", "x", "1;2"])
def test_options_that_are_no_numbers_are_refused(given: str) -> None:
    with pytest.raises(HetnodeError) as error:
        past_of(Told()).round({"round": given})
    assert error.value.code is ErrorCode.BAD_REQUEST
    with pytest.raises(HetnodeError):
        past_of(Told()).credits({"skip": given})


def test_the_text_to_find_is_short_and_may_be_an_end_as_ids_are_shown() -> None:
    told = Told()
    for given, asked in (("..abc ", "abc"), ("…Ab", "Ab"), ("x" * 1000, "x" * 128), (" ", "")):
        with pytest.raises(HetnodeError):
            past_of(told).credits({"find": given})
        assert told.asked.pop()[-1] == asked


def test_an_unknown_round_and_an_unknown_order_are_refused() -> None:
    told = Told()
    for ask, options in (
        (past_of(told).round, {"round": "7"}),
        (past_of(told).credits, {"order": "'; drop"}),
    ):
        with pytest.raises(HetnodeError) as error:
            ask(options)
        assert error.value.code is ErrorCode.BAD_REQUEST
    assert told.asked == [("round", 7)]


async def test_the_same_question_is_asked_once_for_all() -> None:
    asked, go_on = [], threading.Event()

    def query(options: Mapping[str, str]) -> dict[str, Any]:
        asked.append(options)
        go_on.wait(30)
        return {"told": options}

    with ThreadPoolExecutor(2) as threads:
        queries = Queries(threads)
        same = [asyncio.ensure_future(queries.answer(query, {"a": "1"})) for _ in range(50)]
        await asyncio.sleep(0)
        same[0].cancel()  # a reader that leaves
        other = asyncio.ensure_future(queries.answer(query, {"a": "2"}))
        await asyncio.sleep(0)
        go_on.set()
        assert len(set(await asyncio.gather(*same[1:]))) == 1
        await other
    assert sorted(each["a"] for each in asked) == ["1", "2"]


async def test_not_too_many_questions_wait() -> None:
    go_on = threading.Event()

    def query(options: Mapping[str, str]) -> dict[str, Any]:
        go_on.wait(30)
        return {}

    with ThreadPoolExecutor(1) as threads:
        queries = Queries(threads)
        waiting = [asyncio.ensure_future(queries.answer(query, {"a": str(i)})) for i in range(32)]
        await asyncio.sleep(0)
        with pytest.raises(HetnodeError) as error:
            await queries.answer(query, {"a": "one more"})
        assert error.value.code is ErrorCode.RATE_LIMITED
        go_on.set()
        await asyncio.gather(*waiting)


async def test_a_failed_question_fails_for_its_readers() -> None:
    with ThreadPoolExecutor(1) as threads:
        with pytest.raises(HetnodeError) as error:
            await Queries(threads).answer(past_of(Told()).rounds, {})
        assert error.value.code is ErrorCode.NO_HISTORY
