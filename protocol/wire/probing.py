"""The answering end of a probe, which measures a connection in turns (see ProbeMessage), and its limits.

The answering end sends a hello first: if it refuses the call instead, the caller learns the reason, which
gRPC does not give to a caller that writes first.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial

from google.protobuf.message import DecodeError

from protocol.errors import ErrorCode, HetnodeError, faulty_peer
from protocol.pb import hetnode_pb2 as pb
from protocol.trust.rate_limit import RateLimit

DATA_BYTES = 1 << 16
"""Bytes of one message of data, from either end."""

MAX_DATA_BYTES = 128 << 20
"""Bytes of all data of one probe, in each direction."""

MAX_FILL_SECONDS = 3.0
"""Seconds of all fills of one probe."""

MAX_PROBE_SECONDS = 30.0
"""Seconds of one probe from its first message to its last; then the answering end closes it."""

_MAX_TURNS = 1000
_AT_ONCE = 8
_PER_SECOND = 1 / 20
_DATA_AT_ONCE = 3
_DATA_PER_SECOND = 1 / 300
_DATA = pb.ProbeMessage(data=bytes(DATA_BYTES))


class Answers:
    """Answers the messages of one probe. It keeps no data, does no IO and takes the clock as an argument.

    Args:
        now: seconds, never decreasing.
        admit_data: called once, before any data moves; raises HetnodeError if the caller may not send data.
    """

    def __init__(self, now: Callable[[], float], admit_data: Callable[[], None]) -> None:
        self._now, self._admit_data = now, admit_data
        self._is_admitted = False
        self._seconds_left = MAX_FILL_SECONDS
        self._turns = self._counted = self._received = self._sent = 0

    def to(self, message: pb.ProbeMessage) -> Iterator[pb.ProbeMessage]:
        """The answers to `message`, made one by one while the caller iterates.

        Raises (while iterated): HetnodeError BAD_REQUEST if the message is no part of a probe; RATE_LIMITED
        if the probe exceeds a limit; what `admit_data` raises.
        """
        kind = message.WhichOneof("content")
        if kind == "data":
            self._take(len(message.data))
            return
        # Data is bounded in bytes; turns are bounded in number, as an echo costs the caller next to nothing.
        self._turns += 1
        if self._turns > _MAX_TURNS:
            raise limited(f"a probe has at most {_MAX_TURNS} turns")
        match kind:
            case "echo":
                yield message
            case "tally":
                self._admit()  # a caller asks for a tally before it sends data, and so learns of a refusal
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
        # Both bounds: a fast connection would exceed the bytes, a slow one the seconds.
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
    """Limits of the probes that one end answers: how many at once, one of each caller, and how often.

    Echoes cost next to nothing. Data fills the connection of the answering end, so it is admitted rarely.

    Args:
        most: probes of all callers at once.
        now: seconds, never decreasing.

    Attributes:
        is_busy: whether this end needs its connection for training and answers echoes only.
    """

    def __init__(self, most: int, now: Callable[[], float]) -> None:
        self.is_busy: Callable[[], bool] = lambda: False
        self._most, self._now = most, now
        self._inside: set[str] = set()
        self._rate = RateLimit(_AT_ONCE, _PER_SECOND)
        self._data_rate = RateLimit(_DATA_AT_ONCE, _DATA_PER_SECOND)

    @contextmanager
    def one_more(self, caller: str) -> Iterator[Callable[[], None]]:
        """Counts a probe of `caller` while it lasts; gives its `admit_data`. Both raise RATE_LIMITED."""
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
    """Send a hello to the peer `caller` ("" is the operator), then answer until its requests end.

    The caller of this function sets the deadline, MAX_PROBE_SECONDS. Raises as :meth:`Answers.to`.
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
    remedy = "Try again in five minutes, or go without: join --no-measure."
    return HetnodeError(ErrorCode.RATE_LIMITED, f"This probe is refused: {cause}.", remedy)


def _bad(cause: str) -> HetnodeError:
    return faulty_peer(f"This probe is refused: {cause}.")
