"""Text of peers on a page."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from coordinator.ops.dashboard.queries import shown


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
