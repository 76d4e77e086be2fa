"""An immutable mapping whose changed copies share what they have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar, overload

from immutables import Map

K = TypeVar("K")
V = TypeVar("V")
D = TypeVar("D")


class PersistentMap(Mapping[K, V]):
    """A mapping that keeps the order in which its keys were added, as a dict does.

    A changed copy takes time in proportion to the logarithm of the size, where a copied dict takes as long as
    it has entries. The order is kept because rules that visit entries must decide the same in every process,
    and a hash trie alone has the order of hashes, which differ between processes.

    Equal to any mapping with equal entries, in whatever order.
    """

    __slots__ = ("_distinct", "_entries", "_next", "_order")

    def __init__(self, entries: Mapping[K, V] | None = None) -> None:
        given = entries or {}
        # Each value has the number of its key, by which keys are put in order.
        self._entries: Map[K, tuple[int, V]] = Map(
            {key: (number, value) for number, (key, value) in enumerate(given.items())}
        )
        self._next = len(given)
        self._order: tuple[K, ...] | None = tuple(given)
        self._distinct: frozenset[V] | None = None

    def set(self, key: K, value: V) -> PersistentMap[K, V]:
        """A copy in which `key` has `value`. A new key is the last one; a known key keeps its place."""
        known = self._entries.get(key)
        if known is None:
            copy = self._copy(self._entries.set(key, (self._next, value)), self._next + 1, None)
            if self._distinct is not None:  # a new key takes no value away
                copy._distinct = self._distinct if value in self._distinct else self._distinct | {value}
            return copy
        return self._copy(self._entries.set(key, (known[0], value)), self._next, self._order)

    def update(self, changes: Mapping[K, V]) -> PersistentMap[K, V]:
        """A copy with each of `changes`, as :meth:`set`."""
        changed = self
        for key, value in changes.items():
            changed = changed.set(key, value)
        return changed

    def without(self, key: K) -> PersistentMap[K, V]:
        """A copy without `key`; itself if it does not have it."""
        if key not in self._entries:
            return self
        return self._copy(self._entries.delete(key), self._next, None)

    def keep(self, condition: Callable[[K, V], bool]) -> PersistentMap[K, V]:
        """A copy with the entries for which `condition` holds; itself if it holds for all."""
        dropped = [key for key, (_, value) in self._entries.items() if not condition(key, value)]
        if not dropped:
            return self
        entries = self._entries.mutate()
        for key in dropped:
            del entries[key]
        return self._copy(entries.finish(), self._next, None)

    def distinct(self) -> frozenset[V]:
        """The values, each once. Copies with new keys know them without a look at all entries."""
        if self._distinct is None:
            self._distinct = frozenset(value for _, value in self._entries.values())
        return self._distinct

    def __getitem__(self, key: K) -> V:
        return self._entries[key][1]

    @overload
    def get(self, key: K, /) -> V | None: ...

    @overload
    def get(self, key: K, /, default: V | D) -> V | D: ...

    def get(self, key: K, /, default: V | D | None = None) -> V | D | None:
        found = self._entries.get(key)
        return default if found is None else found[1]

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[K]:
        if self._order is None:
            numbered = sorted(self._entries.items(), key=lambda entry: entry[1][0])
            self._order = tuple(key for key, _ in numbered)
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._entries)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Mapping) or len(self) != len(other):
            return NotImplemented if not isinstance(other, Mapping) else False
        missing = object()
        return all(other.get(key, missing) == value for key, (_, value) in self._entries.items())

    def __hash__(self) -> int:
        raise TypeError("the values of a map need not be hashable, so neither is the map")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({dict(self)!r})"

    @classmethod
    def _copy(
        cls, entries: Map[K, tuple[int, V]], following: int, order: tuple[K, ...] | None
    ) -> PersistentMap[K, V]:
        copy: PersistentMap[K, V] = cls.__new__(cls)
        copy._entries, copy._next, copy._order, copy._distinct = entries, following, order, None
        return copy
