"""The payloads that a peer holds: by round and hash, the newest rounds only."""

from __future__ import annotations

from node.net.hive.store import PayloadStore


def test_a_payload_is_found_under_its_round_and_hash_alone() -> None:
    store = PayloadStore(keep_rounds=3)
    store.put(1, "a", b"payload")
    assert store.get(1, "a") == b"payload"
    assert store.get(1, "b") is None
    assert store.get(2, "a") is None


def test_only_the_newest_rounds_are_kept_in_whatever_order_they_come() -> None:
    store = PayloadStore(keep_rounds=3)
    for round in (5, 9, 1, 7, 8):
        store.put(round, "a", b"payload")
    assert [round for round in range(10) if store.get(round, "a") is not None] == [7, 8, 9]


def test_forgetting_drops_the_rounds_before() -> None:
    store = PayloadStore(keep_rounds=3)
    for round in (1, 2, 3):
        store.put(round, "a", b"payload")
    store.forget(before_round=3)
    assert [round for round in (1, 2, 3) if store.get(round, "a") is not None] == [3]
