"""HTTP connections with bounds: of a slow or wrong client only its own connection suffers.

uvicorn bounds neither the time until a request is complete nor that until its answer is read.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

log = logging.getLogger(__name__)

MOST_CONNECTIONS = 512
REQUEST_SECONDS = 10.0
"""From the beginning of a connection, or the end of an answer, to the end of the next request's head."""
ANSWER_SECONDS = 60.0
"""From a request to the end of its answer, but for streams of events, which bound each event."""
STREAM_PATH = "/events"


class BoundedConnection(H11Protocol):
    """One client. Where there are too many, the oldest that serves no stream gives way to a new one.

    The application finds :meth:`abort` in the state of its request.
    """

    _timer: asyncio.TimerHandle | None = None
    _answered: Any = None
    """The exchange whose timer runs."""
    serves_stream = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=64 << 10)
        self._end_after(REQUEST_SECONDS)
        if len(self.connections) > MOST_CONNECTIONS:
            others = (each for each in self.connections if isinstance(each, BoundedConnection))
            # Sets have no order, but the timers tell how long each has been there.
            oldest = min(others, key=lambda each: (each.serves_stream, each.ends_at))
            oldest.abort()

    @property
    def ends_at(self) -> float:
        """When the timer ends it, on the clock of the event loop."""
        return self._timer.when() if self._timer else 0.0

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_after(None)
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def abort(self) -> None:
        """Close the connection, whatever is still to be sent."""
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        try:
            super().data_received(data)
        except Exception as error:
            log.debug("a client of the dashboard sent what cannot be read: %s", error)
            self.abort()

    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle is not None and self.cycle is not self._answered:
            self._answered = self.cycle
            self.scope["state"]["abort"] = self.abort
            self.serves_stream = self.scope["path"] == STREAM_PATH
            self._end_after(None if self.serves_stream else ANSWER_SECONDS)

    def on_response_complete(self) -> None:
        self.serves_stream = False
        self._end_after(REQUEST_SECONDS)
        super().on_response_complete()

    def _end_after(self, seconds: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self.abort)
