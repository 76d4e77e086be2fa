"""The service of people and their tools: each call is a record, answered by the part of the program it asks.

The composition root registers those parts.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from coordinator.api.access import AccessControl
from coordinator.api.run_records import Explain
from protocol.errors import faulty_peer
from protocol.pb import operator_pb2 as pb
from protocol.pb import operator_pb2_grpc as pb_grpc
from protocol.server.calls import Context
from protocol.status import Explanation
from protocol.trust.names import identity_of
from protocol.wire.operator_calls import MOST_BYTES, AskWhy
from protocol.wire.typed_calls import Call, Request, answering, decode_request, encode_answer, name_of

Answering = Callable[[Any, Context], Awaitable[object]]


class OperatorService(pb_grpc.OperatorServicer):
    """Answers by public methods of its parts that take a request and the context of its call.

    Those of `operator` answer the operator's certificate alone, `members` every certificate of the run.
    """

    def __init__(self, access: AccessControl, operator: Sequence[object], members: Sequence[object]) -> None:
        checks = [(part, access.check_operator) for part in operator]
        checks += [(part, access.check_member) for part in members]
        self._answering: dict[str, tuple[type[Request[Any]], Answering, Callable[[Context], None]]] = {
            name_of(request): (request, method, check)
            for part, check in checks
            for request, method in answering(part).items()
        }

    async def Ask(self, request: pb.OperatorCall, context: Context) -> pb.OperatorReply:
        if request.method not in self._answering:
            raise faulty_peer(f"This coordinator answers no call {request.method[:64]!r}.")
        kind, answer, check = self._answering[request.method]
        check(context)
        if len(request.body) > MOST_BYTES:
            raise faulty_peer(f"A call has {len(request.body)} bytes, more than {MOST_BYTES}.")
        try:
            question = decode_request(kind, Call(request.method, request.body))
        except ValueError as error:
            raise faulty_peer(f"A call is not valid: {str(error)[:200]}.") from None
        return pb.OperatorReply(body=bytes(encode_answer(kind, await answer(question, context)).body))


class ExplanationDesk:
    """Answers :class:`AskWhy` by what explains the run."""

    def __init__(self, explain: Explain) -> None:
        self._explain = explain

    async def why(self, call: AskWhy, context: Context) -> Explanation:
        return await self._explain(identity_of(context), call.question)
