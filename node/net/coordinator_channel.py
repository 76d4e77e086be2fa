"""A connection to the coordinator, and the calls that every peer with a certificate of the run can make.

gRPC itself retries after UNAVAILABLE with backoff (the service config below), so the coordinator may receive
any request twice.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Self, TypeVar

import grpc

from node.net.probe import LineProbe, probe_over
from node.net.streams import is_cancelled, text_of
from node.security.channels import open_channel, tls_error, tls_failure
from node.security.credentials import Credentials, stamp
from protocol.errors import ErrorCode, HetnodeError, faulty_peer
from protocol.pb import hetnode_pb2 as pb
from protocol.pb import hetnode_pb2_grpc as pb_grpc
from protocol.pb import operator_pb2, operator_pb2_grpc
from protocol.server.clock import off_text
from protocol.status import Explanation, RunStatus
from protocol.trust.names import COORDINATOR_NAME, TERM_HEADER
from protocol.wire.operator_calls import AskWhy
from protocol.wire.rpc_errors import error_from_rpc
from protocol.wire.status import status_from_pb
from protocol.wire.typed_calls import Reply, Request, decode_answer, encode_request

Answer = TypeVar("Answer")

_SERVICE = pb.DESCRIPTOR.services_by_name["Coordinator"]
# A user waits for Join and Status, and must see at once why TLS fails. A probe that gRPC delays for another
# attempt would measure the delay.
_RETRIED = [
    {"service": _SERVICE.full_name, "method": method.name}
    for method in _SERVICE.methods
    if method.name not in ("Join", "Status", "Probe")
]
_BACKOFF = {"maxAttempts": 5, "initialBackoff": "0.5s", "maxBackoff": "5s", "backoffMultiplier": 2}
_RETRY_POLICY = {**_BACKOFF, "retryableStatusCodes": ["UNAVAILABLE"]}
_OPTIONS = (
    ("grpc.service_config", json.dumps({"methodConfig": [{"name": _RETRIED, "retryPolicy": _RETRY_POLICY}]})),
    ("grpc.enable_retries", 1),
    ("grpc.max_receive_message_length", 4 << 20),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5000),
    # A new connection must begin at once, and not wait as long as the one before would have.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.keepalive_time_ms", 20_000),  # an idle stream of plans must keep its entry in the router's NAT
)


class CoordinatorChannel:
    """A connection to the coordinator at `address`. It shows the same certificate until it is closed.

    `clock_offset`: by how many seconds the coordinator's clock is ahead, if that is known.

    Attributes:
        metadata: of each call: what ends a coordinator that another one has replaced.
    """

    def __init__(
        self, address: str, tls: Credentials, clock_offset: Callable[[], float] = lambda: 0.0
    ) -> None:
        self._address, self._tls, self._clock_offset = address, tls, clock_offset
        self._channel = open_channel(address, tls, COORDINATOR_NAME, _OPTIONS)
        self._stub = pb_grpc.CoordinatorStub(self._channel)
        self.metadata = ((TERM_HEADER, tls.term),) if tls.term else ()
        self._calls = 0
        self._retired = self._dropped = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @asynccontextmanager
    async def call(self) -> AsyncIterator[pb_grpc.CoordinatorStub]:
        """The stub, for one call. Errors of gRPC inside the block are converted by :meth:`error_of`."""
        self._calls += 1
        try:
            yield self._stub
        except grpc.aio.AioRpcError as error:
            raise self.error_of(error) from None
        except asyncio.CancelledError:
            if is_cancelled() or not self._dropped:
                raise
            raise self.unreachable("the connection was given up") from None
        finally:
            self._calls -= 1
            await self._close_if_idle()

    async def ask(self, request: Request[Answer], seconds: float = 10.0) -> Answer:
        """The coordinator's answer to a call of a person (:mod:`protocol.wire.operator_calls`).

        Raises as :meth:`error_of`; BAD_REQUEST for the answer of another version.
        """
        async with self.call():
            return await ask(self._channel, request, seconds, self.metadata)

    @asynccontextmanager
    async def probe(self) -> AsyncIterator[LineProbe]:
        """Measure the connection. Raises as :func:`probe_over`; COORDINATOR_UNREACHABLE."""
        calling = self.call()
        async with calling as stub, probe_over(stub.Probe(metadata=self.metadata), self.error_of) as probe:
            yield probe

    def error_of(self, error: grpc.aio.AioRpcError) -> HetnodeError:
        """The coordinator's refusal; WRONG_AUTHORITY if TLS failed; otherwise COORDINATOR_UNREACHABLE."""
        refusal = error_from_rpc(error)
        if refusal is not None:
            return refusal
        if why := tls_failure(error):
            own = f"; the one of this machine ends at {stamp(self._tls.expires)}"
            off = off_text(-self._clock_offset())
            return tls_error(self._address, "the coordinator of this run", why, off, own)
        return self.unreachable(f"{error.code().name}: {text_of(error)}")

    def unreachable(self, why: str) -> HetnodeError:
        """COORDINATOR_UNREACHABLE, because of `why`."""
        return HetnodeError(
            ErrorCode.COORDINATOR_UNREACHABLE,
            f"The coordinator at {self._address} does not answer ({why}).",
            "Check the address, that 'hetnode coordinator' runs there, and that its port is open.",
        )

    async def retire(self) -> None:
        """Close the connection after the last of its open calls. A stream of plans may be open for days."""
        self._retired = True
        await self._close_if_idle()

    async def drop(self) -> None:
        """Close the connection; its open calls raise COORDINATOR_UNREACHABLE."""
        self._dropped = True
        await self._channel.close()

    async def close(self) -> None:
        await self._channel.close()

    async def _close_if_idle(self) -> None:
        if self._retired and not self._calls:
            await self._channel.close()


async def ask(
    channel: grpc.aio.Channel,
    request: Request[Answer],
    seconds: float,
    metadata: Sequence[tuple[str, bytes]] = (),
) -> Answer:
    """As :meth:`CoordinatorChannel.ask`; a failed call raises AioRpcError."""
    call = encode_request(request)
    stub = operator_pb2_grpc.OperatorStub(channel)
    asked = operator_pb2.OperatorCall(method=call.method, body=bytes(call.body))
    reply = await stub.Ask(asked, timeout=seconds, metadata=metadata)
    try:
        return decode_answer(request, Reply(reply.body))
    except ValueError as error:
        raise faulty_peer(f"The answer of the coordinator is not valid: {str(error)[:200]}.") from None


async def fetch_explanation(address: str, tls: Credentials, question: str) -> Explanation:
    """The coordinator's answer. Raises as :meth:`CoordinatorChannel.error_of`; BAD_OPTION; RATE_LIMITED."""
    async with CoordinatorChannel(address, tls) as channel:
        return await channel.ask(AskWhy(question), 30.0)


async def fetch_status(address: str, tls: Credentials, deadline: float = 5.0) -> RunStatus:
    """The status of the run. Raises as :meth:`CoordinatorChannel.error_of`."""
    async with CoordinatorChannel(address, tls) as channel, channel.call() as stub:
        request = pb.StatusRequest()
        return status_from_pb(await stub.Status(request, timeout=deadline, metadata=channel.metadata))
