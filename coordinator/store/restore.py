"""A run from the folder of its coordinator at a start: its state, and what follows its later events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from coordinator.run.state import events
from coordinator.run.state.apply import apply
from coordinator.run.state.events import Event
from coordinator.run.state.state import State
from coordinator.store.history_file import HISTORY_FILE
from coordinator.store.history_writer import HistoryWriter
from coordinator.store.metrics import MetricsFile
from coordinator.store.store import SqliteStore, Store
from protocol.errors import ErrorCode, HetnodeError, cause_of
from protocol.spec.run import RunSpec
from protocol.trust.private_file import FULL_DISK

log = logging.getLogger(__name__)

_RESTART_SECONDS = 5.0


@dataclass(frozen=True)
class RestoredRun:
    """A run as its folder has it. Metrics and history get every later event, in order."""

    state: State
    metrics: MetricsFile
    history: HistoryWriter


async def once_there_is_space(start: Callable[[], Awaitable[bool]]) -> bool:
    """The result of `start`, which is called again and again while it fails because the disk is full."""
    while True:
        try:
            return await start()
        except HetnodeError as error:
            if error.code is not ErrorCode.DISK_FULL:
                raise
            cause = cause_of(error)
        except OSError as error:
            if error.errno not in FULL_DISK:
                raise
            cause = str(error)
        log.error("[%s] the start waits for space on the disk: %s", ErrorCode.DISK_FULL.label, cause)
        await asyncio.sleep(_RESTART_SECONDS)


def restore_run(
    stack: AsyncExitStack, store: SqliteStore, spec: RunSpec, run: str, folder: Path
) -> RestoredRun:
    """The run in `folder`, whose log is `store`. `stack` ends its metrics and its history.

    Raises HetnodeError as :func:`restore`.
    """
    open_log(store, spec)

    def time_of(number: int) -> float | None:
        return next((event.at for _, event in store.read(number, number)), None)

    metrics = stack.enter_context(MetricsFile(folder / "metrics.jsonl"))
    history = HistoryWriter(folder / HISTORY_FILE, spec, run, time_of, metrics.path, metrics.size)
    stack.push_async_callback(asyncio.to_thread, history.close)
    history.start()
    state = replay_log(store, State(spec, run), (history.catch_up,))
    history.has_caught_up()
    metrics.on_measurement = history.record_measurement
    return RestoredRun(state, metrics, history)


Observer = Callable[[Event, State, State], None]
"""Gets each event with the states before and after it."""


def restore(store: Store, spec: RunSpec, run: str, observers: Sequence[Observer] = ()) -> State:
    """The state after the events of `store`: :func:`open_log`, then :func:`replay_log`."""
    open_log(store, spec)
    return replay_log(store, State(spec, run), observers)


def open_log(store: Store, spec: RunSpec) -> None:
    """Verify the log of a run of `spec`. An empty store gets `spec` and begins a new run.

    Raises:
        HetnodeError: SPEC_MISMATCH if `store` holds a run of another spec; STORE_CORRUPT.
    """
    stored_json = store.verify()
    if stored_json is None:
        store.begin(spec.canonical_json)
    elif (stored := RunSpec.from_json(stored_json)).hash != spec.hash:
        raise HetnodeError(
            ErrorCode.SPEC_MISMATCH,
            f"The folder holds a run of the specification {stored.hash}, but {spec.hash} was given.",
            "Give the options of the stored run, or another folder.",
        )


def replay_log(store: Store, state: State, observers: Sequence[Observer] = ()) -> State:
    """The state after the events of a verified `store`, where `state` is that before the first one.

    Args:
        observers: each gets every event that is applied, in order. No list of all events is in memory at any
            time.

    Raises:
        HetnodeError: STORE_CORRUPT, also if its payloads are signed for another run than that of `state`.
    """
    for event in store.events():
        if isinstance(event, events.PayloadOffered):
            _check_run(event.descriptor.run, state.run)
        before, state = state, apply(state, event)
        for each in observers:
            each(event, before, state)
    return state


def _check_run(signed_for: str, run: str) -> None:
    if signed_for != run:
        raise HetnodeError(
            ErrorCode.STORE_CORRUPT,
            f"The payloads in this folder are signed for run {signed_for}; its authority makes it {run}.",
            "Restore authority.key and authority.pem.",
        )
