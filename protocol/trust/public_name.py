"""Public names: what volunteers let themselves be called in status, credit and leaderboard.

A name proves nothing and is not unique: it is always shown with the end of its peer's id.
"""

from __future__ import annotations

import unicodedata

MAX_NAME = 32
"""Characters of a name in normal form C."""
_MAX_GIVEN = 4 * MAX_NAME
"""Characters of a name before it is normalised: nothing longer is looked at."""
_MAX_MARKS = 2
"""Combining marks on one character. More would cover the lines above and below."""
_MARKUP = frozenset("<>&\"'`[]{}\\")
"""They mean something in HTML, in a terminal library's markup or in JSON."""
_INVISIBLE = frozenset(
    map(chr, (0x034F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x2800, 0x3164, 0xFFA0))
) | frozenset(
    chr(code)
    for first, last in ((0x180B, 0x180F), (0xFE00, 0xFE0F), (0xE0100, 0xE01EF))
    for code in range(first, last + 1)
)
"""Characters that count as printable and show nothing: fillers and variation selectors."""


def public_name(given: str) -> str:
    """`given` in normal form C; "" stands for no name.

    Raises ValueError unless it has 1 to 32 printable characters: no control, format or direction characters,
    no markup, nothing that shows nothing, and no "..", with which the end of a peer id begins.
    """
    if not given:
        return given
    if len(given) > _MAX_GIVEN:
        raise ValueError(f"it has {len(given)} characters, more than {MAX_NAME}")
    name = unicodedata.normalize("NFC", given)
    if len(name) > MAX_NAME:
        raise ValueError(f"it has {len(name)} characters, more than {MAX_NAME}")
    # Controls, format and direction characters, and all white space but U+0020 are not printable.
    for character in name:
        if not character.isprintable() or character in _INVISIBLE:
            raise ValueError(f"it has the character U+{ord(character):04X}, which cannot be seen")
        if character in _MARKUP:
            raise ValueError(f"it has the character {character}")
    if name != name.strip() or "  " in name:
        raise ValueError("it begins or ends with a space, or has two in a row")
    # Compatibility forms, too: U+2026 is three dots.
    if ".." in unicodedata.normalize("NFKC", name):
        raise ValueError("it has two dots in a row, with which the end of a peer id is written")
    _check_marks(name)
    return name


def _check_marks(name: str) -> None:
    marks = 0
    for position, character in enumerate(name):
        marks = marks + 1 if unicodedata.category(character) in ("Mn", "Me") else 0
        if marks and (position == 0 or name[position - marks] == " "):
            raise ValueError("it has an accent without a letter")
        if marks > _MAX_MARKS:
            raise ValueError(f"it has more than {_MAX_MARKS} accents on one letter")


def name_as_text(name: str) -> str:
    """A name of another program's log or message, fit to be shown.

    What this version cannot print, such as letters of a newer Unicode, becomes "?".
    """
    return "".join(letter if letter.isprintable() else "?" for letter in name[:MAX_NAME])


def shown_peer(peer: str, name: str = "") -> str:
    """How people see a peer: ``..`` and the end of its id, after its name if it has one."""
    return f"{name_as_text(name)} (..{peer[-8:]})" if name else f"..{peer[-8:]}"
