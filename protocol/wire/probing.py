"""Measuring a connection by turns: what one end answers to another that measures, and how much of it.

The words are those of ProbeMessage: whoever is welcome is told so, an echo is answered at once, data is
counted and forgotten, a tally says how much came since the last one, and a fill is answered with data for so
many seconds and then its tally. The end that answers speaks first, because gRPC tells a caller that writes
into a refused call nothing of the reason.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial

from google.protobuf.message import DecodeError

from protocol.errors import ErrorCode, HetnodeError
from protocol.pb import hetnode_pb2 as pb
from protocol.trust.rate_limit import RateLimit

DATA_BYTES = 1 << 16
"""Of one message of data, as both ends send it."""

MAX_DATA_BYTES = 128 << 20
"""Of all data of one probe, in each direction."""

MAX_FILL_SECONDS = 3.0
"""Of all fills of one probe."""

MAX_PROBE_SECONDS = 30.0
"""Of one probe from its first message to its last: whoever answers ends it then."""

_MAX_TURNS = 1000
_AT_ONCE = 8
_PER_SECOND = 1 / 20
_DATA_AT_ONCE = 3
_DATA_PER_SECOND = 1 / 300
_DATA = pb.ProbeMessage(data=bytes(DATA_BYTES))


class Answers:
    """Answers the messages of one probe. Keeps nothing of the data, and has no IO and no clock of its own.

    Args:
        now: seconds, never decreasing.
        admit_data: called once, before any data moves; raises HetnodeError where none may.
    """

    def __init__(self, now: Callable[[], float], admit_data: Callable[[], None]) -> None:
        self._now, self._admit_data = now, admit_data
        self._is_admitted = False
        self._seconds_left = MAX_FILL_SECONDS
        self._turns = self._counted = self._received = self._sent = 0

    def to(self, message: pb.ProbeMessage) -> Iterator[pb.ProbeMessage]:
        """The answers to `message`, each made when it is asked for.

        Raises (while iterated): HetnodeError BAD_REQUEST for what is no part of a probe; RATE_LIMITED where
        the probe takes more than one may take; what `admit_data` raises.
        """
        kind = message.WhichOneof("content")
        if kind == "data":
            self._take(len(message.data))
            return
        self._turns += 1
        if self._turns > _MAX_TURNS:
            raise limited(f"a probe has at most {_MAX_TURNS} turns")
        match kind:
            case "echo":
                yield message
            case "tally":
                self._admit()  # who is about to send asks for one first, and hears why not if it may not
                yield pb.ProbeMessage(tally=self._counted)
                self._counted = 0
            case "fill":
                yield from self._fill(message.fill)
            case _:
                raise _bad(f"it holds {kind or 'nothing'} where a turn should begin")

    def _take(self, nbytes: int) -> None:
        if nbytes > DATA_BYTES:
            raise _bad(f"a message of it has {nbytes} bytes of data, at most {DATA_BYTES}")
        self._admit()
        self._received += nbytes
        if self._received > MAX_DATA_BYTES:
            raise limited(f"a probe sends at most {MAX_DATA_BYTES} bytes")
        self._counted += nbytes

    def _fill(self, seconds: float) -> Iterator[pb.ProbeMessage]:
        if not (math.isfinite(seconds) and 0 < seconds <= MAX_FILL_SECONDS):
            raise _bad(f"it asks for data for {seconds} s, it may for at most {MAX_FILL_SECONDS:g}")
        if seconds > self._seconds_left:
            raise limited(f"a probe is sent data for at most {MAX_FILL_SECONDS:g} s")
        self._admit()
        self._seconds_left -= seconds
        ends, before = self._now() + seconds, self._sent
        while self._now() < ends and self._sent + DATA_BYTES <= MAX_DATA_BYTES:
            self._sent += DATA_BYTES
            yield _DATA
        yield pb.ProbeMessage(tally=self._sent - before)

    def _admit(self) -> None:
        if not self._is_admitted:
            self._admit_data()
            self._is_admitted = True


class ProbeDoor:
    """How many probes one end answers at once, one of each caller, and how often the same one may come.

    Echoes cost next to nothing; data takes the line of whoever answers, so it is admitted rarely.

    Args:
        most: probes of all callers at once.
        now: seconds, never decreasing.

    Attributes:
        is_busy: whether this end needs its line for itself, and answers echoes only.
    """

    def __init__(self, most: int, now: Callable[[], float]) -> None:
        self.is_busy: Callable[[], bool] = lambda: False
        self._most, self._now = most, now
        self._inside: set[str] = set()
        self._rate = RateLimit(_AT_ONCE, _PER_SECOND)
        self._data_rate = RateLimit(_DATA_AT_ONCE, _DATA_PER_SECOND)

    @contextmanager
    def one_more(self, caller: str) -> Iterator[Callable[[], None]]:
        """A probe of `caller`, while it lasts, and what admits data to it. Both raise RATE_LIMITED."""
        if caller in self._inside:
            raise limited(f"{caller} is probing already")
        if len(self._inside) >= self._most:
            raise limited(f"{self._most} others are probing now")
        if not self._rate.allows(caller, self._now()):
            raise limited(f"{caller} probes too often")
        self._inside.add(caller)
        try:
            yield partial(self._admit_data, caller)
        finally:
            self._inside.discard(caller)

    def _admit_data(self, caller: str) -> None:
        if self.is_busy():
            raise limited("this node trains, and answers echoes only")
        if not self._data_rate.allows(caller, self._now()):
            raise limited(f"{caller} sends or asks for data too often")


async def answer_all(
    caller: str,
    requests: AsyncIterator[pb.ProbeMessage],
    write: Callable[[pb.ProbeMessage], Awaitable[None]],
    now: Callable[[], float],
    admit_data: Callable[[], None],
) -> None:
    """Welcome the peer `caller`, "" being the operator, and answer until it has no more to ask.

    Args:
        admit_data: as for :class:`Answers`.

    The host sets the deadline, MAX_PROBE_SECONDS. Raises HetnodeError: as :meth:`Answers.to` does, and
    BAD_REQUEST for bytes that are no message.
    """
    answers = Answers(now, admit_data)
    await write(pb.ProbeMessage(hello=caller))
    try:
        async for request in requests:
            for answer in answers.to(request):
                await write(answer)
    except DecodeError:
        raise _bad("its bytes are no message") from None


def limited(cause: str) -> HetnodeError:
    return HetnodeError(
        ErrorCode.RATE_LIMITED,
        f"This probe is refused: {cause}.",
        "Try again in five minutes, or go without: join --no-measure.",
    )


def _bad(cause: str) -> HetnodeError:
    return HetnodeError(
        ErrorCode.BAD_REQUEST,
        f"This probe is refused: {cause}.",
        "Run the same version of hetnode on every peer; if they already do, that peer is faulty.",
    )
