"""What a node does about a failure of its training: one action for each error that it can recover from."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from enum import Enum

from node.core.train.replica_session import Superseded
from protocol.errors import ErrorCode, HetnodeError

log = logging.getLogger(__name__)

_DISK_SECONDS = 10.0


class Remedy(Enum):
    """The action before the node follows the decisions again; it has given up its assignment by then."""

    FOLLOW = "follow"
    """Nothing more: this replica cannot go on, and this node can."""
    REJOIN = "rejoin"
    """The coordinator took this node for lost."""
    REPLACE_ANCHORS = "replace anchors"
    """The anchors here are not those of the other replicas."""
    JUMP_FORWARD = "jump forward"
    """A payload of an earlier round is gone; a checkpoint of another peer contains it."""
    WAIT = "wait"
    """Others are away for a while."""


_REMEDIES = {
    ErrorCode.NEIGHBOUR_LOST: Remedy.FOLLOW,
    ErrorCode.NEIGHBOUR_UNREACHABLE: Remedy.FOLLOW,
    ErrorCode.FRAME_CORRUPT: Remedy.FOLLOW,
    ErrorCode.FRAME_TOO_LARGE: Remedy.FOLLOW,
    ErrorCode.CERTIFICATE_REFUSED: Remedy.FOLLOW,
    ErrorCode.SEAT_LOST: Remedy.FOLLOW,
    ErrorCode.UNKNOWN_PEER: Remedy.REJOIN,
    ErrorCode.ANCHOR_DIVERGED: Remedy.REPLACE_ANCHORS,
    ErrorCode.PAYLOAD_UNAVAILABLE: Remedy.JUMP_FORWARD,
    ErrorCode.STATE_UNAVAILABLE: Remedy.WAIT,
    ErrorCode.COORDINATOR_UNREACHABLE: Remedy.WAIT,
    ErrorCode.COORDINATOR_BEHIND: Remedy.WAIT,
}
_OTHERS_MISSING = frozenset({Remedy.REJOIN, Remedy.JUMP_FORWARD, Remedy.WAIT})


def code_of(error: BaseException) -> ErrorCode | None:
    return error.code if isinstance(error, HetnodeError) else None


def remedy_for(error: BaseException) -> Remedy | None:
    """The action after `error`; None where this node cannot recover from it."""
    if isinstance(error, Superseded):
        return Remedy.FOLLOW
    code = code_of(error)
    return None if code is None else _REMEDIES.get(code)


def is_final_after_the_run(error: BaseException) -> bool:
    """Whether `error` means that others are missing, who do not come back after the end of the run."""
    return remedy_for(error) in _OTHERS_MISSING


async def when_disk_has_room(save: Callable[[], Awaitable[None]]) -> None:
    """Repeat `save` while the disk is full. Raises its other errors."""
    while True:
        try:
            return await save()
        except HetnodeError as error:
            if error.code is not ErrorCode.DISK_FULL:
                raise
            log.error("this node trains on when its disk has room: %s", error)
            await asyncio.sleep(_DISK_SECONDS)
