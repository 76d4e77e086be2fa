"""A run whose coordinator's folder is on this machine: its history, as tables."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordinator.store.history_file import HISTORY_FILE, reading
from coordinator.store.history_sql import COLUMNS, SELECTED
from coordinator.store.history_tables import TABLES as _RECORDS
from coordinator.store.history_tables import Merge
from node.here import known_runs
from protocol.errors import ErrorCode, HetnodeError

if TYPE_CHECKING:
    from coordinator.store.history import SqliteHistory

_BY_NAME = {record.TABLE: record for record in _RECORDS}
TABLES = tuple(_BY_NAME)
"""The tables of a history: `coordinator/store/history_tables.py` says what is in their columns."""


@dataclass(frozen=True)
class OpenedRun:
    """A run by the `folder` of its coordinator, which may be running, or a copy of that folder."""

    folder: Path

    @cached_property
    def answers(self) -> SqliteHistory:
        """Answers to the questions of the commands and pages, such as ``answers.credits()``. Bounded."""
        from coordinator.store.history import SqliteHistory  # noqa: PLC0415

        return SqliteHistory(self.folder / HISTORY_FILE)

    def rows(self, table: str = "replica_rounds") -> list[dict[str, Any]]:
        """All rows of a table in the order of its keys, each by the names of its columns.

        The default has the losses (nats per token) of each replica after each round. Times are Unix times in
        seconds. What is not known is None. The coordinator may have some events yet to write.

        Raises HetnodeError: NO_HISTORY; BAD_OPTION unless `table` is one of :data:`TABLES`.
        """
        if (record := _BY_NAME.get(table)) is None:
            raise HetnodeError(
                ErrorCode.BAD_OPTION, f"No table is called '{table}'.", f"Use one of: {', '.join(TABLES)}."
            )
        names = [each.name for each in COLUMNS[record]]
        flags = [each.kind is bool for each in COLUMNS[record]]
        keys = ", ".join(f"t.{each.name}" for each in COLUMNS[record] if each.merge is Merge.KEY)
        with reading(self.folder / HISTORY_FILE) as db:
            found = db.execute(f"{SELECTED[record]} ORDER BY {keys}")
            return [
                {
                    name: bool(value) if is_flag and value is not None else value
                    for name, is_flag, value in zip(names, flags, row, strict=True)
                }
                for row in found
            ]

    def history(self, table: str = "replica_rounds") -> Any:
        """As :meth:`rows`, in a pandas.DataFrame where pandas is installed (``hetnode[pandas]``)."""
        rows = self.rows(table)
        try:
            from pandas import DataFrame  # noqa: PLC0415
        except ModuleNotFoundError:
            return rows
        return DataFrame(rows, columns=[each.name for each in COLUMNS[_BY_NAME[table]]])


def open_run(run: str | Path | None = None) -> OpenedRun:
    """The run whose coordinator's folder is here.

    `run` is its name or that folder, or the run folder of ``hetnode swarm up``; None is the only one that is
    here. Raises HetnodeError NO_HISTORY where there is none, BAD_OPTION where several are meant.
    """
    name = None if run is None else str(run)
    folder = known_runs.coordinator_folder(name, HISTORY_FILE) or known_runs.coordinator_folder(name)
    if folder is not None:
        return OpenedRun(folder)
    if name is None:
        return OpenedRun(known_runs.only_coordinator())
    raise HetnodeError(
        ErrorCode.NO_HISTORY,
        f"There is no history of {name!r:.80} on this machine.",
        "Give the folder of the run's coordinator.",
    )
