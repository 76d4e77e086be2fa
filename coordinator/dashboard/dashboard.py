"""The dashboard as the coordinator sees it: it listens before anything is written, and serves at last."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

from coordinator.api.run_records import RunRecords
from coordinator.command_loop import CommandLoop
from coordinator.dashboard.explanations import Explanations
from coordinator.dashboard.feed import Feed
from coordinator.dashboard.past import Past
from coordinator.dashboard.port import DashboardPort, dashboard_listener
from coordinator.dashboard.server import DashboardServer
from coordinator.dashboard.source import Source
from protocol.types import PeerId


class Dashboard:
    """It listens from its creation on, unless `address` is None, until `stack` unwinds.

    Args:
        or_near: one of the next ports will do if that of `address` is taken.

    Attributes:
        feed: gets the events of the run.
        resting: gets the peers whose processes rest, with the number of their calls.

    Raises:
        HetnodeError: BAD_ADDRESS, and PORT_IN_USE without `or_near`.
    """

    def __init__(self, address: str | None, or_near: bool, stack: AsyncExitStack) -> None:
        self.feed, self.resting = Feed(), Counter[PeerId]()
        self._listener, self._stack = dashboard_listener(address, or_near, stack), stack

    def serve(self, folder: Path, command_loop: CommandLoop, records: RunRecords) -> None:
        """Show the run in `folder` from now on, until the stack unwinds."""
        if self._listener is None:
            return
        source = Source(command_loop, records, self.feed)
        past = Past(records.history, lambda: command_loop.state)
        explanations = Explanations(records.explainer, command_loop, asyncio.get_running_loop())
        server = DashboardServer(DashboardPort(self._listener, folder), source, past, explanations)
        self._stack.push_async_callback(server.close)
        server.start()
