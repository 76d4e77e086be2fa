"""A HetnodeError across gRPC: the trailing metadata of a failed call carries its code, cause and remedy."""

from __future__ import annotations

from typing import Any, NoReturn
from urllib.parse import quote, unquote

import grpc

from protocol.errors import ErrorCode, HetnodeError

_CODE = "hetnode-code"
_CAUSE = "hetnode-cause"
_REMEDY = "hetnode-remedy"

# gRPC drops calls whose metadata exceed 8 KiB in all.
_MAX_ENCODED = 2000

_INVALID_ARGUMENT = frozenset((ErrorCode.BAD_REQUEST, ErrorCode.FRAME_CORRUPT, ErrorCode.FRAME_TOO_LARGE))


async def abort_with(context: grpc.aio.ServicerContext[Any, Any], error: HetnodeError) -> NoReturn:
    """End the call with `error`; :func:`error_from_rpc` restores it at the other end. Always raises.

    The status is INVALID_ARGUMENT if the message itself was invalid, FAILED_PRECONDITION otherwise.
    """
    status = grpc.StatusCode.FAILED_PRECONDITION
    if error.code in _INVALID_ARGUMENT:
        status = grpc.StatusCode.INVALID_ARGUMENT
    metadata = ((_CODE, error.code.label), (_CAUSE, _encode(error.cause)), (_REMEDY, _encode(error.remedy)))
    await context.abort(status, str(error)[:500], trailing_metadata=metadata)
    raise AssertionError("abort returned")


def error_from_rpc(error: grpc.RpcError) -> HetnodeError | None:
    """The HetnodeError with which the other end refused the call; None if the failure is gRPC's own."""
    metadata = getattr(error, "trailing_metadata", lambda: None)() or ()
    found = {key: value for key, value in metadata if isinstance(value, str)}
    if _CODE not in found:
        return None
    cause, remedy = (_decode(found.get(key, "")) for key in (_CAUSE, _REMEDY))
    return HetnodeError(ErrorCode.from_label(found[_CODE]), cause, remedy)


def _encode(sentence: str) -> str:
    """`sentence`, percent-encoded where it is not printable ASCII, and short enough for metadata."""
    return quote(sentence, safe=" !\"#$&'()*+,-./:;<=>?@[\\]^_`{|}~")[:_MAX_ENCODED]


def _decode(encoded: str) -> str:
    decoded = unquote(encoded[:_MAX_ENCODED], errors="replace")
    return "".join(letter if letter.isprintable() else " " for letter in decoded)
