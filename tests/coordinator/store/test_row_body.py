"""Bodies of rows are stored compressed."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from coordinator.run.state.events import DigestAttested, Event, HoldingsReported, PayloadOffered, RunPaused
from coordinator.store.event_codec import encode
from coordinator.store.row_body import pack_body, unpack_body
from coordinator.store.store import SqliteStore
from protocol.types import Part, PausedBy
from tests.builders import anchor_of, keyed, spec_of

SPEC, PEER = spec_of(), keyed(1)
FREQUENT: tuple[tuple[Event, int], ...] = (
    (PayloadOffered(1.7e9, PEER.payload(SPEC, 0, 7)), 275),
    (HoldingsReported(1.7e9, 0, 7, PEER.peer, (), 400, ()), 80),
    (DigestAttested(1.7e9, 0, 7, Part.STAGE, PEER.peer, anchor_of(0, 7)), 140),
)
"""The rows of which a round has one for each payload, and the most bytes of each."""


@given(st.text(max_size=50), st.integers(0, 200))
def test_a_body_is_read_as_it_was(text: str, times: int) -> None:
    body = "{" + times * text + "}"
    assert unpack_body(pack_body(body)) == body


@pytest.mark.parametrize(("event", "most"), FREQUENT, ids=lambda it: type(it).__name__)
def test_the_rows_of_each_payload_are_short(event: Event, most: int) -> None:
    assert len(pack_body(encode(event)[1])) <= most


@pytest.mark.parametrize("cut", [1, -4, 8])
def test_a_damaged_body_raises_value_error(cut: int) -> None:
    body = pack_body("{" + "x" * 5000 + "}")
    with pytest.raises(ValueError, match="damaged"):
        unpack_body(body[:1] + body[1 + cut :] if cut > 0 else body[:cut])


@given(st.binary(max_size=60))
@example(b"")
@example(b"\x02")
def test_bytes_of_no_body_raise_value_error(body: bytes) -> None:
    with suppress(ValueError):
        unpack_body(body)


def test_a_log_with_long_and_short_rows_is_loaded_and_read(tmp_path: Path) -> None:
    spec, coordinator = spec_of(), keyed(0)
    stored = (*(event for event, _ in FREQUENT), RunPaused(2.0, 3, PausedBy.OPERATOR, 1000 * "long "))
    store = SqliteStore(tmp_path / "log.sqlite", coordinator.peer, coordinator.sign)
    store.begin(spec.canonical_json)
    store.append(stored)
    assert store.read(1, 4) == [*enumerate(stored, start=1)]
    store.close()
    again = SqliteStore(tmp_path / "log.sqlite", coordinator.peer, coordinator.sign)
    assert again.load() == (spec.canonical_json, stored)
    again.close()
