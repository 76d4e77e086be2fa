"""The SQL of the tables of the history: one statement of each kind a table, made from its record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar, get_args, get_type_hints

from coordinator.store.history_tables import TABLES, Merge, PeerTotals, TableRow
from protocol.types import PeerId

T = TypeVar("T", bound=TableRow)


@dataclass(frozen=True)
class Column:
    """A column of a table: the type of its values, whether it may be NULL, and its rule."""

    name: str
    kind: type[Any]
    is_optional: bool
    merge: Merge

    @property
    def is_reference(self) -> bool:
        """Whether it names a peer, for which the tables have the number that the peer has in `peers`."""
        return self.kind is PeerId

    @property
    def definition(self) -> str:
        sql = "INTEGER" if self.is_reference or self.kind in (int, bool) else "REAL"
        sql = "TEXT" if not self.is_reference and issubclass(self.kind, str) else sql
        return f"{self.name} {sql}{'' if self.is_optional else ' NOT NULL'}"

    def read(self, value: Any) -> Any:
        return value if value is None or self.is_reference else self.kind(value)


def _columns_of(table: type[TableRow]) -> tuple[Column, ...]:
    hints = get_type_hints(table, include_extras=True)
    return tuple(_column(each.name, hints[each.name]) for each in fields(table))


def _column(name: str, hint: Any) -> Column:
    annotated = get_args(hint) if hasattr(hint, "__metadata__") else (hint, Merge.NEWEST)
    kinds = [each for each in get_args(annotated[0]) if each is not type(None)]
    return Column(name, kinds[0] if kinds else annotated[0], bool(kinds), annotated[1])


def _created(table: type[TableRow]) -> tuple[str, ...]:
    columns = COLUMNS[table]
    if table is PeerTotals:
        defined = ["number INTEGER PRIMARY KEY", "peer TEXT NOT NULL UNIQUE"]
        defined += [each.definition for each in columns[1:]]
        return (f"CREATE TABLE peers ({', '.join(defined)})",)
    keys = ", ".join(each.name for each in columns if each.merge is Merge.KEY)
    defined = [*(each.definition for each in columns), f"PRIMARY KEY ({keys})"]
    return (f"CREATE TABLE {table.TABLE} ({', '.join(defined)}) WITHOUT ROWID", *table.INDICES)


def _inserted(table: type[TableRow]) -> str:
    columns = COLUMNS[table]
    names = ", ".join(each.name for each in columns)
    number = "(SELECT number FROM peers WHERE peer = ?)"
    refers = [each.is_reference and table is not PeerTotals for each in columns]
    values = ", ".join(number if each else "?" for each in refers)
    if table.IS_ONCE:
        return f"INSERT OR IGNORE INTO {table.TABLE} ({names}) VALUES ({values})"
    keys = ", ".join(each.name for each in columns if each.merge is Merge.KEY)
    changes = ", ".join(
        f"{each.name} = {each.merge.value.format(each.name)}"
        for each in columns
        if each.merge is not Merge.KEY
    )
    return (
        f"INSERT OR IGNORE INTO {table.TABLE} ({names}) VALUES ({values})"
        f" ON CONFLICT ({keys}) DO UPDATE SET {changes}"
    )


def _selected(table: type[TableRow]) -> str:
    refers = [each.is_reference and table is not PeerTotals for each in COLUMNS[table]]
    names = (
        f"(SELECT peer FROM peers WHERE number = t.{each.name})" if refer else f"t.{each.name}"
        for each, refer in zip(COLUMNS[table], refers, strict=True)
    )
    return f"SELECT {', '.join(names)} FROM {table.TABLE} AS t"


COLUMNS = {table: _columns_of(table) for table in TABLES}
"""By table, the columns in the order of its fields."""
CREATED = {table: _created(table) for table in TABLES}
"""The statements that create a table and its indices."""
INSERTED = {table: _inserted(table) for table in TABLES}
"""The statement that adds a row, given the values of its fields. A row about a stranger is left out."""
SELECTED = {table: _selected(table) for table in TABLES}
"""The begin of a query for whole rows of a table, which has the name t in the rest of the query."""


def row_of(table: type[T], values: Sequence[Any]) -> T:
    """The record of a row that :data:`SELECTED` has given."""
    return table(*(each.read(value) for each, value in zip(COLUMNS[table], values, strict=True)))
