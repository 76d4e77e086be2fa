"""Lets a standby follow the event log, and makes the coordinator's answers wait for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from coordinator.store.store import SqliteStore, StoredRow
from protocol.errors import ErrorCode, HetnodeError
from protocol.server.calls import Context
from protocol.wire.convert.fields import endpoint_from_pb
from protocol.wire.operator_calls import FollowLog

log = logging.getLogger(__name__)

WAIT_SECONDS = 10.0
"""How long a call waits for the next row: a line that is silent for longer may be dead."""
PATIENCE_SECONDS = 5.0
"""How long answers wait for a standby. A round loses so much once, when its standby dies."""
MOST_BYTES = 1 << 20


class StandbyDesk:
    """Answers :class:`FollowLog`.

    Each call tells what its standby has on its disk. Once that is all, no caller learns anything that the
    standby does not have, until it is silent for PATIENCE_SECONDS. The run goes on without it then.

    Args:
        store: the log, which is appended to meanwhile.
        note: gets the address of the standby.
    """

    def __init__(self, store: SqliteStore, note: Callable[[str], None]) -> None:
        self._store, self._note = store, note
        self._moved = asyncio.Condition()
        self._held, self._address = 0, ""
        self.is_in_step = False

    async def follow(self, call: FollowLog, _: Context) -> tuple[StoredRow, ...]:
        """Raises HetnodeError: STORE_CORRUPT for a log that is no copy; ALREADY_ACTIVE beside another one."""
        address = endpoint_from_pb(call.address)
        if self.is_in_step and address != self._address:
            raise HetnodeError(
                ErrorCode.ALREADY_ACTIVE,
                f"The standby at {self._address} follows this coordinator already.",
                "Stop that one first: a coordinator has one standby.",
            )
        row_hash = await asyncio.to_thread(self._store.row_hash, call.rows)
        if row_hash is None or row_hash.hex() != call.row_hash:
            raise HetnodeError(
                ErrorCode.STORE_CORRUPT,
                f"The {call.rows} rows of the standby at {address} are no copy of this coordinator's log.",
                "Begin the standby with a new backup: 'hetnode run backup'.",
            )
        self._note(address)
        async with self._moved:
            self._held, self._address = call.rows, address
            if call.rows >= self._store.end[0] and not self.is_in_step:
                self.is_in_step = True
                log.info("the standby at %s has the whole log: answers wait for it from now on", address)
            self._moved.notify_all()
            with suppress(TimeoutError):
                async with asyncio.timeout(WAIT_SECONDS):
                    await self._moved.wait_for(lambda: self._store.end[0] > call.rows)
        return tuple(await asyncio.to_thread(self._store.rows_after, call.rows, MOST_BYTES))

    async def confirmed(self) -> None:
        """Return when the standby has all rows, or after PATIENCE_SECONDS; at once while it lags."""
        rows = self._store.end[0]
        async with self._moved:
            self._moved.notify_all()
            if not self.is_in_step:
                return
            try:
                async with asyncio.timeout(PATIENCE_SECONDS):
                    await self._moved.wait_for(lambda: self._held >= rows)
            except TimeoutError:
                self.is_in_step = False
                log.warning(
                    "the standby at %s does not answer: the run goes on, and its log is on this machine "
                    "alone from row %d on, until the standby is back",
                    *(self._address, self._held + 1),
                )
