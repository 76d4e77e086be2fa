"""The standby of a coordinator: follows its event log into a copy of its folder, and takes the run over."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from coordinator.store.history_file import HISTORY_FILE
from coordinator.store.log_copy import LOG_FILE, PARTNER_FILE, has_log
from node import command_runner
from node.cli.output import say
from node.command_runner import bad_option
from protocol.errors import ErrorCode, HetnodeError
from protocol.trust.host_port import host_port, split_host_port
from protocol.trust.private_file import write_whole

if TYPE_CHECKING:
    from collections.abc import Sequence

    from coordinator.api.succession import TermAt
    from coordinator.run.state.events import Event
    from coordinator.store.metrics import MetricsFile
    from coordinator.store.store import SqliteStore, StoredRow
    from node.net.coordinator_channel import CoordinatorChannel
    from node.security.identity import Identity
    from protocol.spec.run import RunSpec

log = logging.getLogger(__name__)

MARKER = "standby"
"""The file in the folder of a standby that has not taken the run over; where it will be reached then."""
_CALL_SECONDS, _RETRY_SECONDS, _ANSWER_SECONDS, _SHOWN_SECONDS = 30.0, 1.0, 5.0, 2.0
_TEMPORARY = ErrorCode.COORDINATOR_UNREACHABLE, ErrorCode.WRONG_AUTHORITY, ErrorCode.DISK_FULL
METRICS_SECONDS = 5.0
_FEW_ROWS = 20
"""So many come while the standby is in step with a run that is busy; more while it lags."""
_CONNECTION_SECONDS = 3600.0
"""A connection shows one certificate, which ends sooner or later."""


@dataclass(frozen=True)
class StandbyFolder:
    """The folder of a coordinator or a standby, and where this one is, or will be, reached."""

    folder: Path
    own: str

    @property
    def is_of_standby(self) -> bool:
        return (self.folder / MARKER).exists()

    @property
    def has_decided(self) -> bool:
        """Whether who ran here last was the coordinator itself, at this address. A backup has no history."""
        # Without an address its last start has failed.
        is_own = not self.is_of_standby and self._coordinator in ("", self.own)
        return is_own and (self.folder / HISTORY_FILE).exists()

    def check(self, follows: bool, takes_over: bool, listens: bool) -> None:
        """Raises HetnodeError BAD_OPTION if the options do not fit. `listens`: they say where."""
        if follows and takes_over:
            raise bad_option("--standby waits, and --take-over does not.", "Give one of the two.")
        if not follows and (not takes_over or self.has_decided):
            if self.is_of_standby:
                remedy = "--take-over goes on here, once the coordinator is dead; --standby follows it."
                raise bad_option(f"{self.folder} is the folder of a standby.", remedy)
            return
        if not has_log(self.folder):
            remedy = "Make it on the coordinator's machine: 'hetnode run backup --out DIR'."
            raise bad_option(f"{self.folder} is no copy of a coordinator's folder.", remedy)
        if not self.is_of_standby and not listens:
            remedy = "Give --listen HOST:PORT and --advertise HOST."
            raise bad_option("A copy does not say where its new owner will be reached.", remedy)
        if follows and self._coordinator in ("", self.own):
            remedy = "Give the address of this machine, --listen and --advertise, or make a new backup."
            raise bad_option(f"{self.folder} names no coordinator that is not at {self.own}.", remedy)

    @property
    def _coordinator(self) -> str:
        """Where the coordinator of this copy is; "" if that is not known."""
        file = self.folder / (PARTNER_FILE if self.is_of_standby else "address")
        return file.read_text().strip() if file.exists() else ""

    def make_own(self) -> None:
        """Note where the coordinator of this copy is: its partner from now on. Raises OSError."""
        if self._coordinator not in ("", self.own):
            write_whole(self.folder / PARTNER_FILE, self._coordinator)

    def mark(self) -> None:
        """From now on this is the folder of a standby. Raises OSError."""
        if split_host_port(self.own)[1] == 0:
            raise bad_option(
                "Nodes must know the port of a standby before it listens.", "Give it in --listen."
            )
        write_whole(self.folder / MARKER, self.own)


class LogCopy(Protocol):
    """The copy of an event log: a part of coordinator.store.store.SqliteStore."""

    @property
    def end(self) -> tuple[int, bytes]: ...

    def append_rows(self, rows: Sequence[StoredRow]) -> Sequence[Event]: ...


async def follow(
    store: LogCopy,
    connect: Callable[[], CoordinatorChannel],
    own: str,
    metrics: MetricsFile | None = None,
    is_over: bool = False,
) -> None:
    """Copy each row as soon as the coordinator has it, until the run is over and the coordinator ends.

    A coordinator that does not answer is waited for. `connect` opens a connection of the operator to it.
    `metrics` gets the coordinator's, some seconds later. `is_over`: the run was over before.

    Raises HetnodeError: the refusal of the coordinator, such as for a log that is no copy; STORE_CORRUPT.
    """
    from coordinator.run.state.events import RunFinished  # noqa: PLC0415
    from protocol.wire.operator_calls import FollowLog  # noqa: PLC0415

    clock = asyncio.get_running_loop().time
    silent: bool | None = None  # nobody was told yet
    copied = 0.0
    while True:
        try:
            async with connect() as channel:
                until = clock() + _CONNECTION_SECONDS
                while clock() < until:
                    rows, row_hash = store.end
                    found = await channel.ask(FollowLog(rows, row_hash.hex(), own), _CALL_SECONDS)
                    events = await asyncio.to_thread(store.append_rows, found) if found else ()
                    if silent is not False and len(found) < _FEW_ROWS:
                        silent = False
                        log.info("%d rows of the log are here: the standby is in step", store.end[0])
                    is_over |= any(isinstance(event, RunFinished) for event in events)
                    if metrics is not None and clock() > copied + METRICS_SECONDS:
                        copied = copied if await _copy_metrics(channel, metrics) else clock()
        except HetnodeError as error:
            if is_over and error.code is ErrorCode.COORDINATOR_UNREACHABLE:
                return
            if error.code not in _TEMPORARY:
                raise
            if not silent:
                log.warning("%s This standby has %d rows, and goes on waiting", error, store.end[0])
            silent = True
        await asyncio.sleep(_RETRY_SECONDS)


async def _copy_metrics(channel: CoordinatorChannel, metrics: MetricsFile) -> bool:
    """Copy the next lines. Returns whether there may be more by now."""
    from protocol.wire.operator_calls import FollowMetrics  # noqa: PLC0415

    lines = await channel.ask(FollowMetrics(metrics.size), _CALL_SECONDS)
    with suppress(OSError):  # on a full disk the log says so
        metrics.append(lines)
        return bool(lines)
    return False


def _is_over(store: SqliteStore) -> bool:
    from coordinator.run.state.events import RunFinished  # noqa: PLC0415

    return bool(store.read(1, store.end[0], [RunFinished]))


def follow_run(standby: StandbyFolder, spec: RunSpec, identity: Identity) -> None:
    """Follow the coordinator of a copy until its run is over, as :func:`follow`."""
    from coordinator.api.succession import Partner  # noqa: PLC0415
    from coordinator.authority import open_authority, write_operator  # noqa: PLC0415
    from coordinator.store.metrics import MetricsFile  # noqa: PLC0415
    from coordinator.store.store import SqliteStore  # noqa: PLC0415
    from node.net.coordinator_channel import CoordinatorChannel  # noqa: PLC0415
    from node.security.credentials import operator_tls  # noqa: PLC0415

    standby.mark()
    folder, own = standby.folder, standby.own
    authority, partner = open_authority(folder, spec.name), Partner(folder).address

    def connect() -> CoordinatorChannel:
        with suppress(OSError):  # on a full disk the former one is in date for a day
            write_operator(authority, folder)
        return CoordinatorChannel(partner, operator_tls(folder))

    with (
        closing(SqliteStore(folder / LOG_FILE, identity.peer, identity.sign)) as store,
        MetricsFile(folder / "metrics.jsonl") as metrics,
    ):
        store.verify()
        say(f"standby of {partner}; in its place nodes will find this one at {own}")
        say(f"when it is dead: hetnode coordinator --folder {folder} --take-over")
        sys.stdout.flush()  # it may be a file
        command_runner.run(follow(store, connect, own, metrics, _is_over(store)))
    say(f"the run is over; {folder} has its whole log")


def term_at(folder: Path) -> TermAt:
    """Tells the term of the coordinator of this run that answers at an address, 0 where it is not told."""

    async def term(address: str, proof: bytes = b"") -> int | None:
        from node.net.coordinator_channel import fetch_status  # noqa: PLC0415
        from node.net.enrollment import shows_authority  # noqa: PLC0415
        from node.security.credentials import operator_tls  # noqa: PLC0415

        tls = replace(operator_tls(folder), term=proof)
        try:
            return (await fetch_status(address, tls, _ANSWER_SECONDS)).term
        except HetnodeError as error:
            if error.code not in (ErrorCode.COORDINATOR_UNREACHABLE, ErrorCode.WRONG_AUTHORITY):
                return 0  # a refusal is an answer, too
            # It may be busy, or a clock is wrong: then it refuses the certificate without a word.
            return 0 if await shows_authority(address, tls.pin, _SHOWN_SECONDS) else None

    return term


def address_of(listen: str, advertise: str | None) -> str:
    """Where others reach a coordinator with these options."""
    host, port = split_host_port(listen)
    return host_port(advertise or host, port)
