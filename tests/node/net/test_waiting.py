"""How a node waits for its coordinator: what it repeats, what ends it, and what it says meanwhile."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from node.monitoring.figures import NodeFigures
from node.monitoring.report import Rates, report_of
from node.net.enrollment import enroll
from node.net.joining import local_address_towards
from node.net.waiting import CoordinatorWait, span
from node.security.identity import open_identity
from node.views.live_line import node_line
from protocol.errors import ErrorCode, HetnodeError
from protocol.trust.invite import Invite
from tests.virtual.loop import run


def failing(codes: list[ErrorCode], seconds: list[float]) -> Callable[[float], Awaitable[str]]:
    """A call that fails with one code after the other and then succeeds; it notes the seconds it gets."""
    left = iter(codes)

    async def call(may_take: float) -> str:
        seconds.append(may_take)
        for code in left:
            raise HetnodeError(code, "It is away.", "Look at it.")
        return "answer"

    return call


def test_messages_come_at_growing_intervals_with_the_time_waited(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    seconds: list[float] = []

    async def scenario() -> None:
        wait = CoordinatorWait(None)
        waiting = asyncio.create_task(
            wait.answer(failing([ErrorCode.COORDINATOR_UNREACHABLE] * 4000, seconds))
        )
        await asyncio.sleep(1)
        assert wait.is_waiting
        assert await waiting == "answer"
        assert not wait.is_waiting

    run(scenario())
    messages = [record.message for record in caplog.records]
    assert len(seconds) == 4001
    assert seconds[0] < 5 < seconds[1] == seconds[-1]
    first, last = messages[0], messages[-1]
    assert first.startswith("waiting for the coordinator, 0 s so far: It is away. Look at it. ")
    assert "Ctrl-C ends it" in first
    assert "the coordinator answers after 2" in last
    assert last.endswith(" h")
    waited = [record.message.split(", ")[1].split(" so far")[0] for record in caplog.records[:-1]]
    # 10 s, 20 s, ... doubled up to 10 minutes, and then every 10 minutes of more than two hours
    assert 18 <= len(waited) <= 24
    assert [text.split()[1] for text in waited[:3]] == ["s", "s", "s"]
    assert waited[-1].endswith(" h")


@pytest.mark.parametrize(
    "code",
    [
        *(ErrorCode.WRONG_AUTHORITY, ErrorCode.INVITE_EXPIRED, ErrorCode.INVITE_REVOKED, ErrorCode.BANNED),
        *(ErrorCode.BAD_ADDRESS, ErrorCode.CERTIFICATE_REFUSED, ErrorCode.SPEC_MISMATCH),
    ],
)
def test_an_error_that_waiting_cannot_mend_ends_it_at_once(code: ErrorCode) -> None:
    async def scenario() -> None:
        seconds: list[float] = []
        wait = CoordinatorWait(None)
        with pytest.raises(HetnodeError) as error:
            await wait.answer(
                failing([ErrorCode.COORDINATOR_UNREACHABLE, ErrorCode.RATE_LIMITED, code], seconds)
            )
        assert error.value.code is code
        assert len(seconds) == 3

    run(scenario())


def test_a_limit_ends_it_with_the_last_error() -> None:
    async def scenario() -> None:
        began, seconds = asyncio.get_running_loop().time(), list[float]()
        with pytest.raises(HetnodeError, match="It is away"):
            await CoordinatorWait(60).answer(failing([ErrorCode.COORDINATOR_UNREACHABLE] * 1000, seconds))
        assert 50 < asyncio.get_running_loop().time() - began <= 60
        assert all(may_take <= 15 for may_take in seconds)

    run(scenario())


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (socket.EAI_NONAME, ErrorCode.BAD_ADDRESS),
        (socket.EAI_NODATA, ErrorCode.BAD_ADDRESS),
        (socket.EAI_AGAIN, ErrorCode.COORDINATOR_UNREACHABLE),  # as without a network
    ],
)
async def test_only_a_name_of_no_host_is_a_bad_address(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int, code: ErrorCode
) -> None:
    async def getaddrinfo(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(number, "as the resolver says")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo, raising=False)
    invite = Invite("host:1", "host:2", bytes(32), "00" * 6, bytes(16))
    for call in (enroll(invite, open_identity(tmp_path / "key"), 10), local_address_towards("host:1")):
        with pytest.raises(HetnodeError, match="as the resolver says") as error:
            await call
        assert error.value.code is code


async def test_the_own_address_towards_a_coordinator_at_an_ipv6_address() -> None:
    assert await local_address_towards("127.0.0.1:7700") == "127.0.0.1"
    assert await local_address_towards("[::1]:7700") == "::1"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.4, "59 s"), (60, "1 min"), (3599, "60 min"), (9000, "2.5 h")]
)
def test_spans_are_short(seconds: float, text: str) -> None:
    assert span(seconds) == text


def test_a_node_waits_for_its_turn_and_says_so_when_its_place_changes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    places = [(2, 50), (2, 40), (2, 30), (1, 20), (1, 10)]

    async def scenario() -> None:
        wait, left = CoordinatorWait(None), list(places)

        async def call() -> str:
            if not left:
                return "answer"
            place, minutes = left.pop(0)
            cause = f"place {place} of 9 in the waiting list, about {minutes} min at the present pace."
            raise HetnodeError(ErrorCode.WAITING_LIST, cause, "It keeps its place.")

        waiting = asyncio.create_task(wait.turn(call))
        await asyncio.sleep(1)
        assert wait.place == "place 2 of 9 in the waiting list, about 50 min at the present pace"
        figures = NodeFigures()
        figures.wait = wait
        assert node_line(report_of(figures), Rates()).plain == f"waits: {wait.place}"
        assert await waiting == "answer"
        assert wait.place == ""

    run(scenario())
    messages = [record.message for record in caplog.records]
    assert [text.split(",")[0] for text in messages] == [
        "waiting for room in the run: place 2 of 9 in the waiting list",
        "waiting for room in the run: place 1 of 9 in the waiting list",
        "the run has room for this node",
    ]
