"""The dashboard of a run whose coordinator is not running, from its folder."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from coordinator.ops.dashboard.kept import serve_kept
from coordinator.ops.explain.explain import explain
from coordinator.run.state.state import State
from coordinator.store.history import SqliteHistory
from coordinator.store.store import SqliteStore
from protocol.status import Explanation
from tests.support.coordinator_run import play_round, started
from tests.support.dashboard import EventReader, ask
from tests.support.kept_run import A, folder_of

RUN_PAGES = ("/", "/swarm", "/rounds", "/round/1", "/network", "/leaderboard", f"/peer/{A.peer}")


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[tuple[str, int]]:
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def explained(question: str, state: State, history: SqliteHistory, store: SqliteStore) -> Explanation:
        return explain(question, state, history, store.read, state.latest_at)

    task = asyncio.create_task(serve_kept(folder, "127.0.0.1:0", explained, ready.set_result))
    await asyncio.wait({task, ready}, return_when=asyncio.FIRST_COMPLETED)
    try:
        parts = urlsplit(ready.result())
        assert parts.hostname
        assert parts.port
        yield parts.hostname, parts.port
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@pytest.mark.parametrize("rounds", [2, 5], ids=["finished", "stopped"])
async def test_every_page_and_record_of_a_run_that_is_not_served(tmp_path: Path, rounds: int) -> None:
    run = started(replicas=2, stages=2, rounds=rounds)
    for _ in range(2):
        run.now += 20
        play_round(run)
    folder = folder_of(run, tmp_path)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    async with served(folder) as address:
        for page in RUN_PAGES:
            assert (await ask(address, page)).status == 200, page
        reader = await asyncio.to_thread(EventReader, address)
        told = await asyncio.to_thread(reader.until, rounds_decided=2)
        reader.close()
        assert told["live"] is False
        assert told["time"] == run.state.latest_at
        assert told["phase"] == ("finished" if rounds == 2 else "training")
        assert told["events"]
        assert len((await ask(address, "/api/status")).json["peers"]) == 2
        losses = (await ask(address, "/api/losses")).json["mean"]
        assert [each["validation_loss"] for each in losses] == [4.0, 3.0]
        assert len((await ask(address, "/api/rounds")).json["rounds"]) >= 2
        assert (await ask(address, "/api/round?round=1")).json["stages"]
        assert (await ask(address, f"/api/peer?peer={A.peer}")).json["past"]["contributions"]
        assert (await ask(address, "/api/credits")).json["credits"]
        assert (await ask(address, "/api/explain?question=1")).json["statements"]
        assert (await ask(address, "/api/predictions")).status == 200
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
