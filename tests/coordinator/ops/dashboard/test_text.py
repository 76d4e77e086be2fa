"""Text of peers on a page."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.ops.dashboard.queries import shown, without_addresses


def test_control_characters_and_direction_marks_become_spaces() -> None:
    assert shown("\x1b[31mred\r\n\x00\u202egnirts\u200b") == " [31mred    gnirts "


def test_markup_stays_as_text() -> None:
    assert shown("<img src=x onerror=alert(1)>") == "<img src=x onerror=alert(1)>"


@given(st.text(), st.integers(1, 50))
def test_it_is_short_and_printable(text: str, most: int) -> None:
    found = shown(text, most)
    assert len(found) <= most
    assert found.isprintable()
    assert len(text) > most or len(found) == len(text)


def test_a_hundred_thousand_letters_are_cut() -> None:
    assert shown("a" * 100_000, 10) == "aaaaaaaaa…"


@pytest.mark.parametrize(
    "address",
    [
        *("10.1.2.3", "10.1.2.3:7701", "[2001:db8::1]:7701", "2001:db8::1", "::1", "fe80::1%eth0"),
        *("home.example.org:7701", "localhost:80", "volunteer-7:49152"),
        *("/ip4/10.1.2.3/tcp/7701/p2p/12D3Koo", "/dns4/home.example.org/tcp/1", "ipv4:10.1.2.3:7701"),
        *("ipv6:%5B2001:db8::1%5D:7701", "http://10.1.2.3:7780/x", "someone@home.example.org:22"),
    ],
)
@pytest.mark.parametrize("text", ["{}", "cannot open its link at {}: refused", "(cpu, {}, open)", "to {}."])
def test_no_address_is_left_in_a_text(text: str, address: str) -> None:
    found = without_addresses({"a": [text.format(address)], "b": 7701})
    assert found == {"a": [text.format("(an address)")], "b": 7701}


@pytest.mark.parametrize(
    "text",
    [
        *("round 7 of 30: waiting for replica-1", "cuda:0 and cuda:15", "at 12:30:45", "loss 0.5, k=1.25"),
        *("..abcdefgh left: asked to leave", "ratio 1:12", "inner.learning_rate is 1e-3", "a/b.txt"),
    ],
)
def test_other_texts_stay(text: str) -> None:
    assert without_addresses(text) == text
