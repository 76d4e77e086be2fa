"""Public names: what may be one, and how it is shown."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from protocol.trust.public_name import MAX_NAME, name_as_text, public_name, shown_peer
from tests.builders import keyed

ID = keyed(1).peer


@pytest.mark.parametrize(
    "name",
    ["Ada", "José", "李小龍", "नमस्ते", "สวัสดีที่รัก", "שָׁלוֹם", "O’Brien", "🦊 fox", "GPU-farm_7.b", "x" * 32],
)
def test_names_of_many_languages_are_taken_as_they_are(name: str) -> None:
    assert public_name(name) == unicodedata.normalize("NFC", name)


def test_letter_and_accent_become_one_character() -> None:
    assert public_name("Jose\u0301") == "José"


def test_no_text_is_no_name() -> None:
    assert public_name("") == ""


@pytest.mark.parametrize(
    "given",
    [
        *("x" * 33, "x" * 10**6, "\u0301" * 10**5),
        *(" Ada", "Ada ", "A  da", "A\tda", "A\nda", "A\u00a0da", "A\u2003da"),
        *("\u202eadA", "A\u200dda", "A\u2066da", "\ufeffAda", "A\x1b[31mda", "A\x00da", "A\x7fda"),
        *("<b>Ada</b>", "Ada&amp;", "[red]Ada", "{Ada}", "A'da", 'A"da', "A`da", "A\\da"),
        *("Ada (..abcd1234)", "Ada …", "Ada ‥", "Ada .․"),
        *("\u3164", "\u2800", "\u115f", "A\ufe0f", "A\U000e0101", "A\u034f"),
        *("\u0301Ada", "A \u0301da", "A\u0338\u0338\u0338da", "\ud800", "\ue000"),
    ],
)
def test_what_would_deceive_or_spoil_a_page_is_refused(given: str) -> None:
    with pytest.raises(ValueError, match=r"it has|it begins"):
        public_name(given)


@given(st.text(max_size=200))
def test_any_text_is_refused_or_becomes_a_name_that_stays_one(text: str) -> None:
    try:
        name = public_name(text)
    except ValueError:
        return
    assert public_name(name) == name == unicodedata.normalize("NFC", text)
    assert len(name) <= MAX_NAME
    assert name == name_as_text(name)
    assert name.isprintable()
    assert ".." not in name


@given(st.text(max_size=100))
def test_what_another_program_calls_a_name_is_shown_as_short_text(text: str) -> None:
    assert len(name_as_text(text)) <= MAX_NAME
    assert name_as_text(text).isprintable()


def test_a_name_is_shown_with_the_end_of_the_id() -> None:
    assert shown_peer(ID, "Ada") == f"Ada (..{ID[-8:]})"
    assert shown_peer(ID) == f"..{ID[-8:]}"


def test_equal_looking_names_of_two_peers_are_told_apart() -> None:
    latin, cyrillic = public_name("Ada"), public_name("\u0410da")
    assert latin != cyrillic
    assert shown_peer(keyed(1).peer, latin)[-11:] != shown_peer(keyed(2).peer, cyrillic)[-11:]


def test_a_name_means_nothing_to_the_terminals_markup() -> None:
    console = Console(file=None, record=True, width=80)
    with console.capture() as shown:
        console.print(public_name("Ada"), end="")
    assert shown.get() == "Ada"
