"""Frozen records as bytes, and back."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.state.persistent_map import PersistentMap
from coordinator.state.record_codec import pack, unpack


class Colour(StrEnum):
    RED = "red"


@dataclass(frozen=True)
class Leaf:
    name: str
    size: float | None
    colour: Colour = Colour.RED

    def __post_init__(self) -> None:
        if self.size is not None and self.size < 0:
            raise ValueError("negative")


@dataclass(frozen=True)
class Tree:
    leaves: tuple[Leaf, ...]
    by_name: PersistentMap[tuple[int, str], Leaf]
    sets: Mapping[str, frozenset[str]]
    pair: tuple[int, bytes]
    is_old: bool = False


names = st.text(max_size=3)
leaves = st.builds(Leaf, names, st.none() | st.floats(0, allow_nan=False))
keys = st.tuples(st.integers(-(1 << 63), (1 << 64) - 1), names)
trees = st.builds(
    Tree,
    st.lists(leaves, max_size=3).map(tuple),
    st.dictionaries(keys, leaves, max_size=3).map(PersistentMap),
    st.dictionaries(names, st.frozensets(names, max_size=3), max_size=3),
    st.tuples(st.integers(0, 9), st.binary(max_size=3)),
    st.booleans(),
)
LEAF = Leaf("a", 1.0)
TREE = Tree((LEAF, LEAF), PersistentMap({(1, "a"): LEAF}), {"x": frozenset("ab")}, (1, b"2"))


@given(trees)
def test_what_is_read_equals_what_was_written_in_the_same_order(tree: Tree) -> None:
    found = unpack(Tree, pack(Tree, tree))
    assert found == tree
    assert list(found.by_name) == list(tree.by_name)
    assert list(found.sets) == list(tree.sets)
    assert isinstance(found.by_name, PersistentMap)
    assert pack(Tree, found) == pack(Tree, unpack(Tree, pack(Tree, found)))


def test_records_and_sets_are_shared_again() -> None:
    many = Tree((LEAF,) * 100, PersistentMap(), {str(i): frozenset("abc") for i in range(100)}, (1, b""))
    found = unpack(Tree, pack(Tree, many))
    assert all(leaf is found.leaves[0] for leaf in found.leaves)
    assert all(each is found.sets["0"] for each in found.sets.values())
    assert len(pack(Tree, many)) < 1200


def test_a_whole_number_may_stand_for_seconds() -> None:
    found = unpack(Leaf, pack(Leaf, Leaf("a", 2)))
    assert type(found.size) is float


@pytest.mark.parametrize(
    "wrong",
    [
        Tree(TREE.leaves, TREE.by_name, TREE.sets, (1 << 64, b"")),
        Tree([LEAF], TREE.by_name, TREE.sets, TREE.pair),  # type: ignore[arg-type]
        Tree(TREE.leaves, [], TREE.sets, TREE.pair),  # type: ignore[arg-type]
        Tree(TREE.leaves, TREE.by_name, {"x": {"a"}}, TREE.pair),  # type: ignore[dict-item]
        Tree(TREE.leaves, TREE.by_name, TREE.sets, (1, b"", 2)),  # type: ignore[arg-type]
        Tree((None,), TREE.by_name, TREE.sets, TREE.pair),  # type: ignore[arg-type]
        Leaf("a", 1.0),
    ],
)
def test_what_an_annotation_does_not_permit_is_not_written(wrong: Any) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  the sentences are msgpack's, too
        pack(Tree, wrong)


FORMS: Any = msgpack.unpackb(pack(Tree, TREE))


def damaged(place: tuple[int, ...], value: Any) -> bytes:
    copy: Any = msgpack.unpackb(msgpack.packb(FORMS))
    inner = copy
    for index in place[:-1]:
        inner = inner[index]
    inner[place[-1]] = value
    found: bytes = msgpack.packb(copy)
    return found


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ((0,), {}),
        ((0, 0), 5),
        ((1,), 0),  # refers to a record of which there is none
        ((1,), [[]]),
        ((1, 0), None),
        ((1, 0, 1), 1),
        ((1, 0, 1), -1),
        ((1, 0, 1), True),
        ((1, 0, 0, 0), 99),
        ((1, 0, 0, 1), 1),
        ((1, 0, 0, 1), -1.0),
        ((1, 0, 0, 2), "blue"),
        ((1, 0, 0, 2), []),
        ((1, 1, 0), [[1, 0]]),
        ((1, 1), [[[1, 0], 0], [[1, 0], 0]]),
        ((1, 2, 0, 1), [0, 0]),
        ((1, 3), [1]),
        ((1, 4), 1),
    ],
)
def test_other_bytes_are_refused(place: tuple[int, ...], value: Any) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  each field has its own sentence
        unpack(Tree, damaged(place, value))


@given(st.binary(max_size=40), st.integers(0, 80))
def test_random_bytes_never_raise_anything_else(inserted: bytes, at: int) -> None:
    packed = pack(Tree, TREE)
    for data in (inserted, packed[:at], packed[:at] + inserted + packed[at + len(inserted) :]):
        with suppress(ValueError):
            unpack(Tree, data)


def test_a_type_without_a_form_is_an_error_of_the_program() -> None:
    @dataclass(frozen=True)
    class Unknown:
        value: complex

    @dataclass(frozen=True)
    class Either:
        value: int | str

    for kind in (Unknown, Either):
        with pytest.raises(TypeError, match="no form as bytes"):
            unpack(kind, pack(Leaf, LEAF))
