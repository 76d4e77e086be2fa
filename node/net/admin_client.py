"""A person's calls to a coordinator (:mod:`protocol.wire.operator_calls`)."""

from __future__ import annotations

from typing import Self, TypeVar

import grpc

from node.security.channels import open_channel
from node.security.credentials import Credentials
from protocol.errors import ErrorCode, HetnodeError, faulty_peer
from protocol.pb import operator_pb2 as pb
from protocol.pb import operator_pb2_grpc as pb_grpc
from protocol.trust.names import COORDINATOR_NAME
from protocol.wire.rpc_errors import error_from_rpc
from protocol.wire.typed_calls import Reply, Request, decode_answer, encode_request

Answer = TypeVar("Answer")
_CALL_SECONDS = 10.0


class AdminClient:
    """An asynchronous context manager. Each call raises COORDINATOR_UNREACHABLE or the refusal."""

    def __init__(self, address: str, operator: Credentials) -> None:
        self._address = address
        self._channel = open_channel(address, operator, COORDINATOR_NAME, ())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def ask(self, request: Request[Answer]) -> Answer:
        """Call the coordinator. Raises as :func:`ask`."""
        try:
            return await ask(self._channel, request, _CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            refusal = error_from_rpc(error)
            if refusal is not None:
                raise refusal from None
            raise HetnodeError(
                ErrorCode.COORDINATOR_UNREACHABLE,
                f"The coordinator at {self._address} does not answer ({error.code().name}).",
                "Check that 'hetnode coordinator' runs, with this folder.",
            ) from None


async def ask(channel: grpc.aio.Channel, request: Request[Answer], seconds: float) -> Answer:
    """The coordinator's answer to `request` within `seconds`.

    Raises AioRpcError, also for a refusal; HetnodeError BAD_REQUEST for the answer of another version.
    """
    call = encode_request(request)
    stub = pb_grpc.OperatorStub(channel)
    reply = await stub.Ask(pb.OperatorCall(method=call.method, body=bytes(call.body)), timeout=seconds)
    try:
        return decode_answer(request, Reply(reply.body))
    except ValueError as error:
        raise faulty_peer(f"The answer of the coordinator is not valid: {str(error)[:200]}.") from None
