"""Errors across a gRPC call: a HetnodeError arrives as it was raised."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from protocol.errors import ErrorCode, HetnodeError
from protocol.wire.rpc_errors import abort_with, error_from_rpc

SENTENCES = ["", "plain.", "100 % of größe\nnext line 😀", "x" * 5000]


@pytest.mark.parametrize("code", [ErrorCode.SPEC_MISMATCH, ErrorCode.BAD_REQUEST])
@pytest.mark.parametrize("sentence", SENTENCES)
async def test_an_error_survives_a_real_call(code: ErrorCode, sentence: str) -> None:
    async def refuse(request: bytes, context: Any) -> bytes:
        await abort_with(context, HetnodeError(code, sentence, sentence))

    handler = grpc.unary_unary_rpc_method_handler(refuse)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("test.Refusing", {"Call": handler})]
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/test.Refusing/Call")(b"")
    await server.stop(None)
    error = error_from_rpc(caught.value)
    assert error is not None
    assert error.code is code
    expected = sentence.replace("\n", " ")[:2000]
    assert (error.cause, error.remedy) == (expected, expected)
    invalid = code is ErrorCode.BAD_REQUEST
    assert (caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT) == invalid


async def test_a_failure_of_grpc_itself_is_no_hetnode_error() -> None:
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/test.Refusing/Call")(b"")
    assert error_from_rpc(caught.value) is None
