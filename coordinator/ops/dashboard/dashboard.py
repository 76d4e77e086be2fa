"""The dashboard as the coordinator sees it: it listens before anything is written, and serves at last.

A thread of its own serves it, so that the run does not notice its readers. The thread begins with the first
reader: a dashboard without readers costs the coordinator nothing.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from coordinator.api.dashboard import Entrance
from coordinator.api.run_records import RunRecords
from coordinator.ops.dashboard.past import Past
from coordinator.ops.dashboard.port import DashboardPort, ReaderAccess, dashboard_listener
from coordinator.ops.dashboard.queries import KEPT_SECONDS, Explanations, Queries
from coordinator.ops.dashboard.source import Feed, LiveRecords, Records
from coordinator.run.command_loop import CommandLoop
from protocol.types import PeerId

if TYPE_CHECKING:
    from uvicorn import Server

log = logging.getLogger(__name__)

_END_SECONDS = 3.0
_THREADS = 2


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

    def serve(self, folder: Path, command_loop: CommandLoop, records: RunRecords, entrance: Entrance) -> None:
        """Show the run in `folder` from now on, until the stack unwinds."""
        if self._listener is None:
            return
        source = LiveRecords(command_loop, records, self.feed, entrance, folder)
        past = Past(records.history, lambda: command_loop.state)
        explanations = Explanations(records.explain, asyncio.get_running_loop())
        server = DashboardServer(DashboardPort(self._listener, folder), source, past, explanations)
        self._stack.push_async_callback(server.close)
        server.start()


class DashboardServer:
    """Waits on the port for the first reader. Create it, :meth:`start` it, and close it in the end.

    Whatever fails in it is a line in the log: the run goes on.
    """

    def __init__(self, port: DashboardPort, source: Records, past: Past, explanations: Explanations) -> None:
        self._port, self._source, self._past, self._explanations = port, source, past, explanations
        self._thread: threading.Thread | None = None
        self._stop: Callable[[], None] | None = None
        self._ready = threading.Event()

    def start(self) -> None:
        """Begin to wait for readers."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._port.socket.fileno(), self._serve)
        log.info("dashboard: %s", self._port.url)

    def _serve(self) -> None:
        asyncio.get_running_loop().remove_reader(self._port.socket.fileno())
        self._thread = threading.Thread(target=self._run, name="dashboard", daemon=True)
        self._thread.start()

    async def close(self) -> None:
        """End within a few seconds, with all connections closed."""
        if self._thread is None:
            asyncio.get_running_loop().remove_reader(self._port.socket.fileno())
        else:
            await asyncio.to_thread(self._join)
        self._port.close()

    def _join(self) -> None:
        assert self._thread is not None
        if self._ready.wait(_END_SECONDS) and self._stop is not None:
            self._stop()
        self._thread.join(_END_SECONDS)

    def _run(self) -> None:
        try:
            asyncio.run(self._served())
        except Exception:
            log.exception("the dashboard has ended; the run goes on")
        finally:
            self._ready.set()

    async def _served(self) -> None:
        # Few coordinators need them, and none before somebody looks.
        from uvicorn import Config, Server  # noqa: PLC0415

        from coordinator.ops.dashboard.application import Application, BoundedConnection  # noqa: PLC0415

        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: log.debug("dashboard: %s", context.get("message")))
        # Explanations wait for each other, and not for the past, nor it for them.
        with ThreadPoolExecutor(_THREADS, "dashboard") as threads, ThreadPoolExecutor(1) as explaining:
            application = Application(
                self._source,
                self._past,
                ReaderAccess(self._port.token, self._source.run),
                threads,
                Queries(explaining, KEPT_SECONDS),
                self._explanations,
            )
            config = Config(
                application,
                http=BoundedConnection,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="critical",
                access_log=False,
                proxy_headers=False,
                server_header=False,
                h11_max_incomplete_event_size=16 << 10,
                timeout_graceful_shutdown=1,
            )
            server = Server(config)

            def stop() -> None:
                loop.call_soon_threadsafe(_end, application.live.close, server)

            self._stop = stop
            self._ready.set()
            try:
                await server.serve([self._port.socket])
            finally:
                for connection in list(server.server_state.connections):
                    connection.transport.abort()


def _end(close_streams: Callable[[], None], server: Server) -> None:
    close_streams()
    server.should_exit = True
