"""How many large answers are sent at one moment."""

from __future__ import annotations

import asyncio

from google.protobuf.message import Message

from protocol.server.calls import Context

_LARGE_BYTES = 8 << 10
_PLACES = 64
_PLACE_SECONDS = 1.0


class LargeAnswers:
    """Bounds the memory of answers that all members get at one moment, such as a group of 1,000 members.

    gRPC copies an answer for each call, and keeps the copy until the caller's connection takes it.

    Args:
        places: answers that are sent at once; the others wait in their order.
        seconds: a caller that does not take its answer gives its place free after so long.
    """

    def __init__(self, places: int = _PLACES, seconds: float = _PLACE_SECONDS) -> None:
        self._places, self._seconds = asyncio.Semaphore(places), seconds

    async def wait_for_place(self, answer: Message, context: Context) -> None:
        """Wait until the call of `context` may send `answer`. Small answers do not wait."""
        if answer.ByteSize() < _LARGE_BYTES:
            return
        await self._places.acquire()
        place = _Place(self._places)
        context.add_done_callback(place.leave)
        asyncio.get_running_loop().call_later(self._seconds, place.leave)


class _Place:
    def __init__(self, places: asyncio.Semaphore) -> None:
        self._places, self._is_held = places, True

    def leave(self, _: object = None) -> None:
        """Give the place free; the second time does nothing."""
        if self._is_held:
            self._is_held = False
            self._places.release()
