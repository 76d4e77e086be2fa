"""The payloads that a peer holds: on its disk, by round and hash, the newest rounds only."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

import pytest

from node.exchange.payload_store import PayloadStore

FULL = Path("/dev/null/payloads")
"""Nothing can be written there, as on a full disk."""


@pytest.fixture(params=["on disk", "in memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> PayloadStore:
    return PayloadStore(tmp_path if request.param == "on disk" else FULL, keep_rounds=3)


def put(store: PayloadStore, round_number: int, payload: bytes) -> str:
    sha256 = hashlib.sha256(payload).hexdigest()
    store.put(round_number, sha256, payload)
    return sha256


def rounds_of(store: PayloadStore, rounds: Iterable[int], sha256: str) -> list[int]:
    return [round_number for round_number in rounds if store.get(round_number, sha256) is not None]


def test_a_payload_is_found_only_under_its_round_and_hash(store: PayloadStore) -> None:
    sha256 = put(store, 1, b"payload")
    assert store.has(1, sha256)
    assert store.get(1, sha256) == b"payload"
    for round_number, other in ((1, "0" * 64), (2, sha256)):
        assert not store.has(round_number, other)
        assert store.get(round_number, other) is None


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 250])
def test_a_payload_comes_in_pieces_of_at_most_the_size_asked_for(store: PayloadStore, size: int) -> None:
    payload = os.urandom(size)
    pieces = list(store.pieces(1, put(store, 1, payload), 100) or ())
    assert b"".join(pieces) == payload
    assert all(0 < len(piece) <= 100 for piece in pieces)


def test_forgetting_drops_the_rounds_before(store: PayloadStore) -> None:
    for round_number in (2, 3):
        sha256 = put(store, round_number, b"payload")
    store.forget(before_round=3)
    assert rounds_of(store, (2, 3), sha256) == [3]


def test_only_the_newest_rounds_are_kept_in_any_order_of_arrival(tmp_path: Path) -> None:
    store = PayloadStore(tmp_path, keep_rounds=3)
    for round_number in (5, 9, 1, 7, 8):
        sha256 = put(store, round_number, b"payload")
    assert rounds_of(store, range(10), sha256) == [7, 8, 9]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "round-000007",
        "round-000008",
        "round-000009",
    ]


def test_a_payload_of_an_old_round_is_held_until_the_next_one_comes(tmp_path: Path) -> None:
    store = PayloadStore(tmp_path, keep_rounds=3)
    for round_number in (9, 1):
        sha256 = put(store, round_number, b"payload")
    assert rounds_of(store, (1, 9), sha256) == [1, 9]
    put(store, 8, b"payload")
    assert rounds_of(store, (1, 8, 9), sha256) == [8, 9]


def test_rounds_without_payloads_count_as_rounds(tmp_path: Path) -> None:
    store = PayloadStore(tmp_path, keep_rounds=3)
    for round_number in (1, 5):
        sha256 = put(store, round_number, b"payload")
    assert rounds_of(store, (1, 5), sha256) == [5]


def test_a_new_store_on_the_same_folder_has_the_same_payloads(tmp_path: Path) -> None:
    first = PayloadStore(tmp_path, keep_rounds=3)
    held = {
        (round_number, put(first, round_number, payload)): payload
        for round_number in (4, 5)
        for payload in (b"a", b"b")
    }
    again = PayloadStore(tmp_path, keep_rounds=3)
    assert {(round_number, sha256): again.get(round_number, sha256) for round_number, sha256 in held} == held
    assert rounds_of(PayloadStore(tmp_path, keep_rounds=1), (4, 5), next(iter(held))[1]) == [5]


def test_partial_files_are_removed_and_unknown_files_are_kept(
    tmp_path: Path,
) -> None:
    sha256 = put(PayloadStore(tmp_path, keep_rounds=3), 4, b"payload")
    folder = tmp_path / "round-000004"
    half = folder / f"{'1' * 64}.123.partial"
    half.write_bytes(b"half a pay")
    strange = [tmp_path / "notes.txt", folder / "README"]
    for path in strange:
        path.write_text("mine")
    store = PayloadStore(tmp_path, keep_rounds=3)
    assert store.get(4, sha256) == b"payload"
    assert not store.has(4, "1" * 64)
    assert not half.exists()
    assert all(path.exists() for path in strange)


@pytest.mark.parametrize("damage", ["turned bit", "cut short", "removed"])
def test_a_damaged_payload_is_dropped_and_can_be_put_again(tmp_path: Path, damage: str) -> None:
    sha256 = put(PayloadStore(tmp_path, keep_rounds=3), 4, b"payload")
    store = PayloadStore(tmp_path, keep_rounds=3)
    (path,) = (tmp_path / "round-000004").iterdir()
    if damage == "removed":
        path.unlink()
    else:
        path.write_bytes(b"qayload" if damage == "turned bit" else b"payl")
    assert store.get(4, sha256) is None
    assert not store.has(4, sha256)
    store.put(4, sha256, b"payload")
    assert store.get(4, sha256) == b"payload"


def test_a_full_disk_is_logged_once_and_memory_keeps_the_payloads(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = PayloadStore(tmp_path, keep_rounds=9)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(os, "fsync", _full)
        hashes = [put(store, round_number, bytes([round_number])) for round_number in (1, 2, 3)]
    assert [record.getMessage().split()[0] for record in caplog.records] == ["[disk-full]"]
    # Memory is for the rounds under way only.
    assert [store.get(round_number, sha256) for round_number, sha256 in enumerate(hashes, 1)] == [
        None,
        b"\2",
        b"\3",
    ]
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    sha256 = put(store, 4, b"payload")
    assert PayloadStore(tmp_path, keep_rounds=9).get(4, sha256) == b"payload"


def _full(_: int) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
