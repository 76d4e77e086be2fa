"""What a member does with a decision whose application is cancelled."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from node.core.train.member_anchors import MemberAnchors
from node.core.train.services import Services
from node.exchange.transport import RoundEnd
from node.ipc.worker_calls import Digests
from protocol.types import Aborted, Part, PeerId, StageRange
from tests.builders import spec_of


class Worker:
    """Takes its time to abort a round."""

    reads_files = True

    def __init__(self) -> None:
        self.begun, self.goes_on = asyncio.Event(), asyncio.Event()

    async def call(self, request: Any) -> Any:
        if isinstance(request, Digests):
            return {(0, Part.STAGE): (4, "anchor")}
        self.begun.set()
        await self.goes_on.wait()
        return None


class Transport:
    """Notes which rounds have ended."""

    def __init__(self) -> None:
        self.ended: asyncio.Queue[RoundEnd] = asyncio.Queue()

    async def end_round(self, ended: RoundEnd) -> None:
        self.ended.put_nowait(ended)


async def test_the_transport_hears_of_a_round_that_was_applied_although_the_member_was_cancelled(
    tmp_path: Path,
) -> None:
    worker, transport = Worker(), Transport()
    services = SimpleNamespace(
        spec=spec_of(stages=1),
        worker=worker,
        transport=transport,
        coordinator=None,
        membership=SimpleNamespace(run_view=SimpleNamespace(round_number=100)),
        figures=SimpleNamespace(waits=None),
        identity=SimpleNamespace(peer=PeerId("own")),
        compare=None,
    )
    info = SimpleNamespace(parts={(0, Part.STAGE): None})
    anchors = MemberAnchors(
        cast(Services, services), StageRange(0, 1), cast(Any, info), tmp_path, cast(Any, None)
    )
    await anchors.refresh()
    applying = asyncio.create_task(anchors.apply(Aborted(0, 5, 1, "a test"), Part.STAGE, {}, None))
    await worker.begun.wait()
    applying.cancel()  # as when another stage of the member fails
    with pytest.raises(asyncio.CancelledError):
        await applying
    worker.goes_on.set()
    assert (await transport.ended.get()).round_number == 5
    assert anchors.round_of(0, Part.STAGE) == 5
