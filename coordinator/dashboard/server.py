"""Serves the dashboard in a thread of its own, so that the run does not notice its readers.

The thread begins with the first reader: a dashboard without readers costs the coordinator nothing.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from coordinator.dashboard.access import Access
from coordinator.dashboard.explanations import KEPT_SECONDS, Explanations
from coordinator.dashboard.past import Past
from coordinator.dashboard.port import DashboardPort
from coordinator.dashboard.queries import Queries
from coordinator.dashboard.source import Source

if TYPE_CHECKING:
    from uvicorn import Server

log = logging.getLogger(__name__)

_END_SECONDS = 3.0
_THREADS = 2


class DashboardServer:
    """Waits on the port for the first reader. Create it, :meth:`start` it, and close it in the end.

    Whatever fails in it is a line in the log: the run goes on.
    """

    def __init__(self, port: DashboardPort, source: Source, past: Past, explanations: Explanations) -> None:
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

        from coordinator.dashboard.application import Application  # noqa: PLC0415
        from coordinator.dashboard.connections import BoundedConnection  # noqa: PLC0415

        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: log.debug("dashboard: %s", context.get("message")))
        # Explanations wait for each other, and not for the past, nor it for them.
        with ThreadPoolExecutor(_THREADS, "dashboard") as threads, ThreadPoolExecutor(1) as explaining:
            application = Application(
                self._source,
                self._past,
                Access(self._port.token, self._source.run),
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
