"""Long bodies of rows are stored compressed."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.state.event_codec import encode
from coordinator.state.events import PeerLeft, RunPaused
from coordinator.storage.row_body import LONG, pack_body, unpack_body
from coordinator.storage.store import SqliteStore
from protocol.types import PausedBy
from tests.builders import keyed, spec_of


@given(st.text(max_size=50), st.integers(0, 200))
def test_a_body_is_read_as_it_was(text: str, times: int) -> None:
    body = "{" + times * text + "}"
    assert unpack_body(pack_body(body)) == body


def test_only_a_long_body_is_compressed() -> None:
    short, long = "{" + "x" * (LONG - 3) + "}", "{" + "x" * (LONG - 2) + "}"
    assert pack_body(short) == short
    assert len(pack_body(long)) < LONG / 10


@pytest.mark.parametrize("cut", [1, -4, 8])
def test_a_damaged_body_raises_value_error(cut: int) -> None:
    body = pack_body("{" + "x" * LONG + "}")
    with pytest.raises(ValueError, match="damaged"):
        unpack_body(body[:1] + body[1 + cut :] if cut > 0 else body[:cut])


def test_a_log_with_long_and_short_rows_is_loaded_and_read(tmp_path: Path) -> None:
    spec, coordinator = spec_of(), keyed(0)
    stored = (
        PeerLeft(1.0, keyed(1).peer, "short", finished=False),
        RunPaused(2.0, 3, PausedBy.OPERATOR, LONG * "long "),
    )
    assert len(encode(stored[1])[1]) > LONG
    store = SqliteStore(tmp_path / "log.sqlite", coordinator.peer, coordinator.sign)
    store.begin(spec.canonical_json)
    store.append(stored)
    assert store.read(1, 2) == [*enumerate(stored, start=1)]
    store.close()
    again = SqliteStore(tmp_path / "log.sqlite", coordinator.peer, coordinator.sign)
    assert again.load() == (spec.canonical_json, stored)
    again.close()
