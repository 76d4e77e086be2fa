"""The links of a member, of which one fails while the other is being opened."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any, cast

import pytest

from node.core.train import replica_links
from node.core.train.services import Services
from node.net.membership import PeerAssignment
from protocol.errors import ErrorCode, HetnodeError
from protocol.types import Dialer, Link, Member, PeerId, Plan, Replica, StageRange
from tests.builders import spec_of

MEMBERS = tuple(
    Member(PeerId(name), StageRange(at, at + 1), "192.0.2.1:7710") for at, name in enumerate("abc")
)


class Server:
    """Waits for the link of a neighbour that never comes."""

    line = None

    def __init__(self) -> None:
        self.waits, self.is_over = asyncio.Event(), False

    async def accept(self, *_: Any) -> Any:
        self.waits.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.is_over = True


async def test_no_attempt_lives_on_when_the_other_link_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()

    async def refused(*_: Any) -> None:
        await server.waits.wait()
        raise HetnodeError(ErrorCode.NEIGHBOUR_UNREACHABLE, "It refuses.", "Wait.")

    async def nothing(*_: Any) -> Any:
        return {}

    monkeypatch.setattr(replica_links, "dial", refused)
    replica = Replica(0, MEMBERS, (Link(8, Dialer.DOWNSTREAM), Link(8, Dialer.DOWNSTREAM)))
    services = SimpleNamespace(
        run="run",
        spec=spec_of(stages=3),
        directory=SimpleNamespace(endpoints=nothing),
        coordinator=SimpleNamespace(credentials=SimpleNamespace(tls=None)),
        membership=SimpleNamespace(estimates=SimpleNamespace(received=None)),
        link_server=server,
        through=nothing,
    )
    assignment = PeerAssignment(Plan(1, 1, 0, (replica,), "a test"), replica, 1)
    async with AsyncExitStack() as stack:
        with pytest.raises(HetnodeError, match="It refuses"):
            await replica_links.open_links(cast(Services, services), assignment, 1, stack)
        assert server.is_over
