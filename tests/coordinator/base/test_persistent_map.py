"""A persistent map behaves as a dict that is copied for each change."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.base.persistent_map import PersistentMap

KEYS = st.sampled_from("abcdefgh")
CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("set"), KEYS, st.integers(0, 3)),
        st.tuples(st.just("without"), KEYS, st.just(0)),
        st.tuples(st.just("keep"), KEYS, st.integers(0, 3)),
    ),
    max_size=30,
)


@given(CHANGES)
def test_each_version_has_the_entries_and_the_order_of_a_copied_dict(changes: list) -> None:
    versions = [(PersistentMap[str, int](), dict[str, int]())]
    for change, key, value in changes:
        persistent, copied = versions[-1][0], dict(versions[-1][1])
        match change:
            case "set":
                persistent, copied[key] = persistent.set(key, value), value
            case "without":
                persistent = persistent.without(key)
                copied.pop(key, None)
            case "keep":
                persistent = persistent.keep(lambda k, v, key=key, value=value: k != key or v == value)
                copied = {k: v for k, v in copied.items() if k != key or v == value}
        versions.append((persistent, copied))
        if key < "e":  # a map that was read has noted its order and its values
            assert list(persistent) == list(copied)
            assert persistent.distinct() == set(copied.values())
    # All of them, since a later change must not touch an earlier version.
    for persistent, copied in versions:
        assert list(persistent.items()) == list(copied.items())
        assert persistent.distinct() == set(copied.values())
        assert len(persistent) == len(copied)
        assert persistent == copied == dict(persistent)
        assert persistent == PersistentMap(dict(reversed(copied.items())))


def test_an_unchanged_map_is_the_same_object() -> None:
    first = PersistentMap({"a": 1})
    assert first.without("b") is first
    assert first.keep(lambda key, value: True) is first


def test_maps_differ_by_keys_values_and_kind() -> None:
    first = PersistentMap({"a": 1})
    assert first != PersistentMap({"a": 2})
    assert first != PersistentMap({"b": 1})
    assert first != PersistentMap({"a": 1, "b": 1})
    assert first != [("a", 1)]
    with pytest.raises(TypeError):
        hash(first)
