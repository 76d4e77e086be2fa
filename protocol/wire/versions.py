"""Which version of the protocol this program and another one both speak."""

from __future__ import annotations

from protocol.errors import ErrorCode, HetnodeError
from protocol.types import PROTOCOL_VERSION

OLDEST_PROTOCOL = 4
"""The oldest that this program still speaks, so that old and new nodes meet in one run. Version 3 had another
order of samples from a hub."""


def common_version(whose: str, own: str, newest: int, oldest: int = 0) -> int:
    """The newest version that this program and another one speak, which speaks `oldest` to `newest`.

    `oldest` 0: the other one speaks `newest` alone. `whose` and `own` name both programs, because either side
    may read the message: "the node", "the coordinator".

    Raises HetnodeError VERSION_MISMATCH with what each speaks.
    """
    chosen, oldest = min(newest, PROTOCOL_VERSION), oldest or newest
    if chosen < max(oldest, OLDEST_PROTOCOL):
        raise HetnodeError(
            ErrorCode.VERSION_MISMATCH,
            f"{whose[0].upper()}{whose[1:]} speaks {_spoken(oldest, newest)} of the protocol, {own} "
            f"{_spoken(OLDEST_PROTOCOL, PROTOCOL_VERSION)}.",
            f"Update {whose if newest < PROTOCOL_VERSION else own}, which speaks the older one.",
        )
    return chosen


def _spoken(oldest: int, newest: int) -> str:
    return f"version {newest}" if oldest >= newest else f"versions {oldest} to {newest}"
