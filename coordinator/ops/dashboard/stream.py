"""Live updates: the record of the run as server-sent events, made once for all readers."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from coordinator.ops.dashboard.queries import Record

log = logging.getLogger(__name__)

MOST_STREAMS = 256
INTERVAL_SECONDS = 1.0
BEAT_SECONDS = 5.0
"""So often a stream says at least that the coordinator is there."""
SEND_SECONDS = 20.0
"""A reader that does not take an event for so long is left."""


class LiveRun:
    """The newest record of the run for all open streams. While there are none, nothing is made.

    Args:
        read: makes the record.
        version: of the pages; a page of another version loads itself anew.
    """

    def __init__(self, read: Callable[[], Record], version: str) -> None:
        self._read, self._version = read, version
        self._record: Record | None = None
        self._event = b""
        self._changed = asyncio.Event()
        self._made_at = -INTERVAL_SECONDS
        self._making: asyncio.Task[None] | None = None
        self.open_streams = 0
        self.closing = False

    def event(self) -> bytes:
        """The newest record as an event; at most as old as the interval."""
        now = time.monotonic()
        if now - self._made_at >= INTERVAL_SECONDS:
            self._made_at = now
            record = self._read()
            if record != self._record:
                self._record = record
                self._event = self._as_event("run", record)
                self._changed.set()
                self._changed = asyncio.Event()
        return self._event

    async def until_changed(self, seen: bytes) -> bytes:
        """The next event after `seen`, or a sign of life after some seconds without one."""
        if self._event == seen and not self.closing:
            try:
                async with asyncio.timeout(BEAT_SECONDS):
                    await self._changed.wait()
            except TimeoutError:
                return self._as_event("beat", {})
        return self._event

    def close(self) -> None:
        """End all streams."""
        self.closing = True
        self._changed.set()

    def opened(self) -> None:
        self.open_streams += 1
        if self._making is None:
            self._making = asyncio.create_task(self._make())

    def closed(self) -> None:
        self.open_streams -= 1

    async def _make(self) -> None:
        while self.open_streams and not self.closing:
            await asyncio.sleep(INTERVAL_SECONDS)
            try:
                self.event()
            except Exception:  # the next record may be made again
                log.exception("the dashboard cannot show the run")
        self._making = None

    def _as_event(self, name: str, record: Record) -> bytes:
        data = json.dumps({"time": time.time(), "version": self._version, **record}, allow_nan=False)
        return f"event: {name}\ndata: {data}\n\n".encode()


class EventStream:
    """The answer to one reader: the newest record, and then each change, until it leaves."""

    def __init__(self, live: LiveRun, request: Request, headers: list[tuple[bytes, bytes]]) -> None:
        self._live, self._request, self._headers = live, request, headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        left = asyncio.create_task(self._until_left(receive))
        self._live.opened()
        try:
            await self._send(send, {"type": "http.response.start", "status": 200, "headers": self._headers})
            event = self._live.event()
            await self._send(send, _body(event))
            while not left.done() and not self._live.closing:
                following = asyncio.create_task(self._live.until_changed(event))
                await asyncio.wait({left, following}, return_when=asyncio.FIRST_COMPLETED)
                if not following.done():
                    following.cancel()
                    break
                found = following.result()
                if found != event and not self._live.closing:
                    await self._send(send, _body(found))
                if found.startswith(b"event: run"):
                    event = found
            await self._send(send, {"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            # What it has not read would wait for it without end.
            self._request.state.abort()
        finally:
            left.cancel()
            self._live.closed()

    async def _until_left(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async def _send(self, send: Send, message: dict[str, object]) -> None:
        async with asyncio.timeout(SEND_SECONDS):
            await send(message)


def _body(data: bytes) -> dict[str, object]:
    return {"type": "http.response.body", "body": data, "more_body": True}
