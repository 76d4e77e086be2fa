"""The document by which a run is found: whoever serves it may have written anything into it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import ErrorCode, HetnodeError
from protocol.trust.invite import Invite, open_invite
from protocol.trust.run_id import run_id_of
from protocol.wire.run_page import MOST_BYTES, RUN_PAGE, RunPage, open_page
from tests.builders import spec_of

PIN = bytes(range(32))
PAGE = RunPage(run_id_of(spec_of(), PIN), PIN.hex(), 57_600, 30, 3, 4, "write to ada@example.org")
OPEN = open_invite("example.org:7700", "example.org:7701", PIN)


def test_a_page_is_read_as_it_was_written() -> None:
    assert open_page(RUN_PAGE.encode(PAGE)) == (PAGE, None)
    opened = replace(PAGE, invite=OPEN.encode())
    assert open_page(RUN_PAGE.encode(opened)) == (opened, OPEN)
    later = RUN_PAGE.encode(PAGE).replace(b"{", b'{"of_a_later_version":[1],', 1)
    assert open_page(later) == (PAGE, None)


@pytest.mark.parametrize(
    "changes",
    [
        {"run": f"../{PAGE.run}"},
        {"run": f"a/{PAGE.run}"},
        {"run": "tiny-0123456789ab-" + "0" * 32},
        {"run": f"\x1b[2J{PAGE.run}"},
        {"authority": PIN.hex().upper()},
        {"authority": "00" * 32},
        {"contact": "x" * 301},
        {"members": -1},
        {"invite": "hetnode1-nothing"},
        {"invite": open_invite("example.org:7700", "example.org:7701", bytes(32)).encode()},
        {"invite": Invite("h.example:1", "h.example:2", PIN, "01" * 6, bytes(16)).encode()},
        {"invite": open_invite("169.254.169.254:80", "example.org:7701", PIN).encode()},
        {"invite": open_invite("example.org:7700", "0.0.0.0:22", PIN).encode()},
    ],
    ids=str,
)
def test_a_page_that_contradicts_itself_or_leads_to_strange_places_is_refused(
    changes: dict[str, Any],
) -> None:
    page = {**vars(PAGE), **changes}
    text = RUN_PAGE.encode(RunPage(**page))
    with pytest.raises(HetnodeError) as refused:
        open_page(text)
    assert refused.value.code is ErrorCode.BAD_REQUEST


@given(st.binary(max_size=200) | st.text().map(str.encode))
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(HetnodeError) as refused:
        open_page(data)
    assert refused.value.code is ErrorCode.BAD_REQUEST


def test_a_long_page_is_not_parsed() -> None:
    with pytest.raises(HetnodeError):
        open_page(RUN_PAGE.encode(PAGE) + b" " * MOST_BYTES)
