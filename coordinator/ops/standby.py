"""Lets a standby follow the event log, and makes the coordinator's answers wait for it."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from coordinator.api.succession import Fence
from coordinator.store.metrics import MetricsFile
from coordinator.store.store import SqliteStore, StoredRow
from protocol.errors import ErrorCode, HetnodeError
from protocol.server.calls import Context
from protocol.wire.convert.fields import endpoint_from_pb
from protocol.wire.operator_calls import FollowLog, FollowMetrics

log = logging.getLogger(__name__)

WAIT_SECONDS = 10.0
"""How long a call waits for the next row: a line that is silent for longer may be dead."""
PATIENCE_SECONDS = 5.0
"""How long answers wait for a standby. A round loses so much once, when its standby dies."""
MOST_BYTES = 1 << 20


class StandbyDesk:
    """Answers :class:`FollowLog` and :class:`FollowMetrics`.

    Each call tells what its standby has on its disk. Once that is all, no caller learns anything that the
    standby does not have, until it is silent for PATIENCE_SECONDS. The run goes on without it then.

    Args:
        store, metrics: the log and the metrics, which are appended to meanwhile.
        fence: is told the address of the standby, and asked whether it has taken the run over.
    """

    def __init__(self, store: SqliteStore, metrics: MetricsFile, fence: Fence) -> None:
        self._store, self._metrics, self._fence = store, metrics, fence
        self._moved = asyncio.Condition()
        self._held, self._address, self._heard = 0, "", 0.0
        self.is_in_step = False

    async def follow(self, call: FollowLog, _: Context) -> tuple[StoredRow, ...]:
        """Raises HetnodeError: STORE_CORRUPT for a log that is no copy; ALREADY_ACTIVE beside another one."""
        address, now = endpoint_from_pb(call.address), asyncio.get_running_loop().time()
        # A standby with fewer rows than before is another one, in a copy of the folder.
        is_other = address != self._address or call.rows < self._held
        if self.is_in_step and is_other and now < self._heard + WAIT_SECONDS + PATIENCE_SECONDS:
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
        self._fence.note(address)
        async with self._moved:
            self._held, self._address, self._heard = call.rows, address, now
            if call.rows >= self._store.end[0] and not self.is_in_step:
                self.is_in_step = True
                log.info("the standby at %s has the whole log: answers wait for it from now on", address)
            self._moved.notify_all()
            with suppress(TimeoutError):
                async with asyncio.timeout(WAIT_SECONDS):
                    await self._moved.wait_for(lambda: self._store.end[0] > call.rows)
        return tuple(await asyncio.to_thread(self._store.rows_after, call.rows, MOST_BYTES))

    async def follow_metrics(self, call: FollowMetrics, _: Context) -> bytes:
        return await asyncio.to_thread(self._metrics.lines_from, max(0, call.begin), MOST_BYTES)

    async def confirmed(self) -> None:
        """Return when the standby has all rows, or after PATIENCE_SECONDS; at once while it lags.

        Raises HetnodeError COORDINATOR_REPLACED where another coordinator decides: nobody gets an answer.
        """
        rows = self._store.end[0]
        try:
            async with asyncio.timeout(PATIENCE_SECONDS), self._moved:
                self._moved.notify_all()
                await self._moved.wait_for(lambda: not self.is_in_step or self._held >= rows)
        except TimeoutError:
            await self._fence.look()  # it may be silent because it has taken the run over
            self.is_in_step = self._held >= rows
            if not self.is_in_step:
                log.warning(
                    "the standby at %s does not answer: the run goes on, and its log is on this machine "
                    "alone from row %d on, until the standby is back",
                    *(self._address, self._held + 1),
                )
        self._fence.raise_error()
