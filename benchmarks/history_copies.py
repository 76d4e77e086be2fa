"""Makes a long history of a short one: copies its rounds again and again, within SQLite.

The rows of a copy are those that a coordinator would write of rounds with the same figures: only the numbers
of rounds, plans and events and the times are later. Sums are multiplied. All indices are kept up while rows
are added, so the file has the order of pages that a run leaves behind.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

_OF_ROUNDS = ("rounds", "stage_rounds", "contributions", "measurements", "replica_rounds", "round_figures")
_OF_EVENTS = {
    "changes": "sequence",
    "estimates": "sequence",
    "plans": "sequence",
    "sessions": "joined_sequence",
}
"""Tables whose rows belong to events, and the column with the number of the event."""
_TRAFFIC = "link_bytes link_bytes_dense payload_bytes payload_bytes_dense"
_SUMS = {
    "run": f"committed aborted tokens stage_tokens {_TRAFFIC}",
    "peers": "stage_tokens stage_rounds payload_bytes link_bytes",
    "replicas": f"tokens {_TRAFFIC}",
}
_NEWEST = {"run": "sequence at", "peers": "last_round credit_sequence", "replicas": "last_round epoch"}
"""Columns that name something of the newest round."""


@dataclass(frozen=True)
class Block:
    """The rounds 1 to `rounds` of a history that has no others.

    Attributes:
        first_sequence: of the newest event before them.
        sequences, plans: that they have.
        seconds: that they take.
    """

    rounds: int
    first_sequence: int
    sequences: int
    plans: int
    seconds: float

    def later(self, column: str, copies: int) -> str:
        """An SQL expression: the value of `column` in the copy number `copies`."""
        kind = column.removeprefix("last_").removeprefix("from_")
        if kind == "round":
            return f"{column} + {copies * self.rounds}"
        if kind == "epoch":
            return f"{column} + {copies * self.plans}"
        if column.endswith("sequence"):
            return (
                f"iif({column} > {self.first_sequence - 1}, {column} + {copies * self.sequences}, {column})"
            )
        if column == "at" or column.endswith("_at"):
            return f"{column} + {round(1000 * copies * self.seconds)}"
        return column


def multiply(path: Path, block: Block, copies: int) -> None:
    """Make `copies` of the block in the file at `path`, with the block itself."""
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        for pragma in ("journal_mode = OFF", "synchronous = OFF", "cache_size = -1000000"):
            db.execute(f"PRAGMA {pragma}")
        wheres = {table: f"round BETWEEN 1 AND {block.rounds}" for table in _OF_ROUNDS}
        last = block.first_sequence + block.sequences
        wheres |= {
            table: f"{column} > {block.first_sequence} AND {column} <= {last}"
            for table, column in _OF_EVENTS.items()
        }
        db.execute("DELETE FROM rounds WHERE round > ?", (block.rounds,))  # it has begun, and nothing more
        for copy in range(1, copies):
            db.execute("BEGIN")
            for table, where in wheres.items():
                columns = [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
                values = ", ".join(block.later(column, copy) for column in columns)
                db.execute(f"INSERT INTO {table} SELECT {values} FROM {table} WHERE {where}")
            db.execute("COMMIT")
        for table, columns in _SUMS.items():
            db.execute(
                f"UPDATE {table} SET " + ", ".join(f"{name} = {name} * {copies}" for name in columns.split())
            )
        for table, columns in _NEWEST.items():
            later = ", ".join(f"{name} = {block.later(name, copies - 1)}" for name in columns.split())
            db.execute(f"UPDATE {table} SET {later}")
