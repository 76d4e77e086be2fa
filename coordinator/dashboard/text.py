"""Text of peers, made fit for a page: it may be of any length and hold any characters."""

from __future__ import annotations

MOST_LETTERS = 400


def shown(text: str, most: int = MOST_LETTERS) -> str:
    """`text` with at most `most` letters. Control characters, and those that turn the direction of writing,
    become spaces. Nothing is escaped: that is for those who make HTML of it.
    """
    cut = text[: most + 1]
    clean = "".join(letter if letter.isprintable() else " " for letter in cut)
    return clean if len(clean) <= most else f"{clean[: most - 1]}…"
