"""The dashboard of a run that no coordinator serves: it is finished, stopped or archived."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from coordinator.ops.dashboard.dashboard import DashboardServer
from coordinator.ops.dashboard.past import Past
from coordinator.ops.dashboard.port import DashboardPort, listen_near
from coordinator.ops.dashboard.queries import Explanations
from coordinator.ops.dashboard.source import Feed, KeptRecords
from coordinator.run.state.events import Event
from coordinator.run.state.state import State
from coordinator.store.history import SqliteHistory
from coordinator.store.history_file import HISTORY_FILE
from coordinator.store.history_writer import write_events
from coordinator.store.log_copy import first_state, opened_copy, status_after
from coordinator.store.store import SqliteStore
from protocol.errors import ErrorCode, HetnodeError
from protocol.status import Explanation

Explain = Callable[[str, State, SqliteHistory, SqliteStore], Explanation]
"""Answers a question about the run from its last state, its history and its log."""


async def serve_kept(folder: Path, address: str, explain: Explain, on_ready: Callable[[str], None]) -> None:
    """Show the run whose coordinator had `folder` as it was at the newest event, until cancelled.

    Nothing is written below `folder`. `on_ready` is called with the address of the pages: `address`, which
    is one of loopback, or one with a port near it.

    Raises HetnodeError: STORE_CORRUPT, PORT_IN_USE.
    """
    async with AsyncExitStack() as stack:
        _, store = found = stack.enter_context(opened_copy(folder))
        path = Path(stack.enter_context(TemporaryDirectory(prefix="hetnode-")), HISTORY_FILE)
        feed = Feed()
        state = write_events(
            path, first_state(folder, found[0]), _noted(feed, store), folder / "metrics.jsonl"
        )
        status, history = status_after(folder, state), SqliteHistory(path)

        async def explained(caller: str, question: str) -> Explanation:
            return await asyncio.to_thread(explain, question, state, history, store)

        if (listener := listen_near(address)) is None:
            raise HetnodeError(
                ErrorCode.PORT_IN_USE, f"No port near {address} is free for the pages.", "End what uses them."
            )
        stack.callback(listener.close)
        port = DashboardPort(listener, None)
        source = KeptRecords(lambda: state, lambda: status, feed.lines, folder)
        explanations = Explanations(explained, asyncio.get_running_loop())
        server = DashboardServer(port, source, Past(history, lambda: state), explanations)
        stack.push_async_callback(server.close)
        server.start()
        on_ready(port.url)
        await asyncio.get_running_loop().create_future()


def _noted(feed: Feed, store: SqliteStore) -> Iterator[tuple[int, Event]]:
    for number, event in enumerate(store.events(), start=1):
        feed.note(event)
        yield number, event
