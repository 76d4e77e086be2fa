"""How gRPC reports the end of a stream."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

STREAM_ERRORS = (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError)
"""Raised when a stream has ended: at the caller, at the servicer, and at a use after the end."""


async def status_of(call: Any) -> grpc.aio.AioRpcError:
    """The status of a call that has ended, which a failed read or write does not give."""
    return grpc.aio.AioRpcError(
        await call.code(), await call.initial_metadata(), await call.trailing_metadata(), await call.details()
    )


def text_of(error: grpc.RpcError) -> str:
    """gRPC's message on a failed call, short enough for a message of ours."""
    return str(error.details() or error.code().name)[:200]


def is_cancelled() -> bool:
    """Whether a caught CancelledError is real: gRPC also raises it from a write whose call has ended."""
    task = asyncio.current_task()
    return task is not None and bool(task.cancelling())
