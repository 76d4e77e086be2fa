"""Probes of the coordinator or of another peer: round trip, and sustained transfer in both directions.

:class:`LineProbe` is the calling half over any stream; protocol.wire.probing is the answering half. Both
directions are measured by the bytes that have arrived, never by bytes handed to a socket. The first part of
the time does not count, because connections start slowly.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from node import hooks
from node.net.peer_address import Through, directly, target_of
from node.net.streams import STREAM_ERRORS, is_cancelled, status_of, text_of
from node.security.channels import open_channel, tls_failure
from node.security.credentials import Credentials
from protocol.errors import ErrorCode, HetnodeError
from protocol.pb import hetnode_pb2 as pb
from protocol.pb import hetnode_pb2_grpc as pb_grpc
from protocol.server.line import UNLIMITED, Line
from protocol.trust.names import identity_of, peer_of, tls_name
from protocol.types import PeerId
from protocol.wire.probing import (
    DATA_BYTES,
    MAX_DATA_BYTES,
    MAX_PROBE_SECONDS,
    ProbeDoor,
    answer_all,
    limited,
)
from protocol.wire.rpc_errors import error_from_rpc

SECONDS = 2.0  # for which data is sent in each direction
_SETTLING = 0.2  # first share of a transfer, which does not count
_ECHOES = 5
MOST_SECONDS = 20.0  # of a whole probe
_MOST_SENT = MAX_DATA_BYTES // 2  # a very fast connection needs no more
_DATA = pb.ProbeMessage(data=bytes(DATA_BYTES))


@dataclass(frozen=True)
class Figures:
    """A connection's measurements: seconds of a round trip, and bytes per second in each direction."""

    round_trip: float
    uplink: float
    downlink: float


class LineProbe:
    """The calling half of a probe. It does not trust the other end, and reads only what it has asked for.

    Every method raises HetnodeError FRAME_CORRUPT for a wrong answer, and the errors of `read` and `write`.
    A probe that has raised or was cancelled cannot be used again. `now` is a clock that never goes back.
    """

    def __init__(
        self,
        read: Callable[[], Awaitable[Any]],
        write: Callable[[Any], Awaitable[None]],
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._read, self._write, self._now = read, write, now

    async def welcome(self) -> None:
        """Wait until the other end admits this probe. Call it once, before all else."""
        await self._next("hello")

    async def round_trip(self, echoes: int = _ECHOES) -> float:
        """Seconds of the fastest of several echoes, sent one after the other."""
        fastest = float("inf")  # the minimum, because delays by other traffic only add to it
        for number in range(1, echoes + 1):
            asked = self._now()
            await self._write(pb.ProbeMessage(echo=number))
            answer = await self._next("echo")
            if answer.echo != number:
                raise _corrupt(f"echo {number} came back as {answer.echo}")
            fastest = min(fastest, self._now() - asked)
        return fastest

    async def uplink(self, seconds: float = SECONDS, line: Line = UNLIMITED) -> float:
        """Bytes per second that arrive at the other end while this end sends for `seconds`."""
        # A write into a refused call does not say why, so wait to be admitted before the first write.
        await self._write(pb.ProbeMessage(tally=0))
        await self._tally(0)
        began, sent, settled = self._now(), 0, 0
        settling: asyncio.Task[tuple[int, float]] | None = None
        try:
            while self._now() - began < seconds and sent < _MOST_SENT:
                await line.up.take(DATA_BYTES)
                await self._write(_DATA)
                sent += DATA_BYTES
                share = max((self._now() - began) / seconds, sent / _MOST_SENT)
                if settling is None and share >= _SETTLING:
                    # Its answer arrives while data is still being sent, and starts the measured time.
                    await self._write(pb.ProbeMessage(tally=0))
                    settling, settled = asyncio.create_task(self._tally(sent)), sent
            if settling is None:
                return 0.0
            await self._write(pb.ProbeMessage(tally=0))
            _, settled_at = await settling
            arrived, at = await self._tally(sent - settled)
        finally:
            if settling is not None:
                settling.cancel()
        if not arrived:  # very slow: no data was sent after the settling share
            return sent / (at - began) if at > began else 0.0
        return arrived / (at - settled_at) if at > settled_at else 0.0

    async def downlink(self, seconds: float = SECONDS, line: Line = UNLIMITED) -> float:
        """Bytes per second that arrive here while the other end sends for `seconds`."""
        await self._write(pb.ProbeMessage(fill=seconds))
        received, asked = 0, (self._now(), 0)  # times are paired with the bytes that had come by then
        first, settled, last = None, None, asked
        while (answer := await self._next("data", "tally")).WhichOneof("content") == "data":
            received += len(answer.data)
            await line.down.take(len(answer.data))
            if received > MAX_DATA_BYTES:
                raise _corrupt(f"it sends more than {MAX_DATA_BYTES} bytes")
            last = (self._now(), received)
            first = first or last
            if settled is None and last[0] - first[0] >= _SETTLING * seconds:
                settled = last
        if answer.tally != received:
            raise _corrupt(f"{received} of its {answer.tally} bytes have come")
        # A very fast or very slow transfer has nothing after the settling time: measure from earlier on.
        for begin in (settled, first, asked):
            if begin is not None and last[1] > begin[1] and last[0] > begin[0]:
                return (last[1] - begin[1]) / (last[0] - begin[0])
        return 0.0

    async def figures(self, seconds: float = SECONDS, line: Line = UNLIMITED) -> Figures:
        """Measure the round trip and both directions, these as far as `line` allows."""
        round_trip = await self.round_trip()
        return Figures(round_trip, await self.uplink(seconds, line), await self.downlink(seconds, line))

    async def _tally(self, sent: int) -> tuple[int, float]:
        """Read a tally, which must be `sent` bytes; return it and the time of its arrival."""
        answer = await self._next("tally")
        if answer.tally != sent:
            raise _corrupt(f"{answer.tally} of {sent} bytes are said to have come")
        return answer.tally, self._now()

    async def _next(self, *kinds: str) -> Any:
        message = await self._read()
        if message is grpc.aio.EOF:
            raise _corrupt("it ends the stream")
        kind = message.WhichOneof("content")
        if kind not in kinds:
            raise _corrupt(f"it sends {kind or 'nothing'} instead of {' or '.join(kinds)}")
        return message


@asynccontextmanager
async def probe_over(
    call: Any, unreachable: Callable[[grpc.RpcError], HetnodeError]
) -> AsyncIterator[LineProbe]:
    """A probe over `call`, a Probe stream that has just been opened.

    Raises HetnodeError: the refusal of the other end; FRAME_CORRUPT; the result of `unreachable` for gRPC's
    own failure; NEIGHBOUR_UNREACHABLE if the probe takes too long.
    """
    try:
        async with asyncio.timeout(MOST_SECONDS):
            probe = LineProbe(call.read, call.write)
            await probe.welcome()
            yield probe
    except TimeoutError:
        raise HetnodeError(
            ErrorCode.NEIGHBOUR_UNREACHABLE,
            f"A probe was not over after {MOST_SECONDS:.0f} s.",
            "The connection is very slow, or busy: try again later.",
        ) from None
    except DecodeError:
        raise _corrupt("its bytes are no message of it") from None
    except (*STREAM_ERRORS, asyncio.CancelledError) as error:
        if isinstance(error, asyncio.CancelledError) and is_cancelled():
            raise
        status = await status_of(call)
        raise error_from_rpc(status) or unreachable(status) from None
    finally:
        call.cancel()


@asynccontextmanager
async def probe_peer(
    endpoint: str, peer: PeerId, credentials: Credentials, through: Through = directly
) -> AsyncIterator[LineProbe]:
    """A probe of the connection to `peer`, which listens at `endpoint`, where `through` leads.

    Raises HetnodeError as :func:`probe_over`; CERTIFICATE_REFUSED if another peer answers at `endpoint`;
    NEIGHBOUR_UNREACHABLE, also if no peer may have the endpoint.
    """

    def unreachable(status: grpc.RpcError) -> HetnodeError:
        if why := tls_failure(status):
            return HetnodeError(
                ErrorCode.CERTIFICATE_REFUSED,
                f"What answers at {endpoint} has no certificate of {peer} ({why}).",
                "Another program or peer listens there.",
            )
        return _unreachable(endpoint, peer, text_of(status))

    hooks.current().before_contact(peer)
    try:
        target = await target_of(await through(endpoint), peer)
    except OSError as error:
        raise _unreachable(endpoint, peer, str(error)) from None
    channel = open_channel(target, credentials, tls_name(peer), ())
    try:
        async with probe_over(pb_grpc.StageLinkStub(channel).Probe(), unreachable) as probe:
            yield probe
    finally:
        await channel.close()


async def answer_probe(
    requests: AsyncIterator[Any], context: Any, door: ProbeDoor, line: Line = UNLIMITED
) -> None:
    """Answer one probe of a peer, as fast as `line` allows.

    Raises HetnodeError: RATE_LIMITED, BAD_REQUEST, CERTIFICATE_REFUSED.
    """
    caller = peer_of(identity_of(context))
    if caller is None:
        raise HetnodeError(
            ErrorCode.CERTIFICATE_REFUSED,
            "Only peers of this run may probe its peers.",
            "Use the certificate that this run has issued to the peer.",
        )

    async def write(message: pb.ProbeMessage) -> None:
        await line.up.take(len(message.data))
        await context.write(message)

    with door.one_more(caller) as admit_data:
        try:
            async with asyncio.timeout(MAX_PROBE_SECONDS):
                now = asyncio.get_running_loop().time
                await answer_all(caller, requests, write, now, admit_data)
        except TimeoutError:
            raise limited(f"it was not over after {MAX_PROBE_SECONDS:.0f} s") from None
        except STREAM_ERRORS:
            return  # the caller is gone


def _unreachable(endpoint: str, peer: PeerId, why: str) -> HetnodeError:
    return HetnodeError(
        ErrorCode.NEIGHBOUR_UNREACHABLE,
        f"Peer {peer} cannot be reached at {endpoint}: {why}.",
        "Check that its advertised address and port are open to this machine.",
    )


def _corrupt(cause: str) -> HetnodeError:
    return HetnodeError(
        ErrorCode.FRAME_CORRUPT,
        f"The other end does not answer a probe as it should: {cause}.",
        "Update the program of that end; if it is the newest, it has a fault.",
    )
