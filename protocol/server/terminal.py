"""What may reach a terminal, of texts that others have written: files, specifications, peers."""

from __future__ import annotations

import logging

_KEPT = "\n\t"


def visible(text: str) -> str:
    """`text` with a space for each character that is none to read: escapes, C1 controls, marks of direction.

    Lines and tabs stay. Without its first character no sequence for a terminal begins.
    """
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() or letter in _KEPT else " " for letter in text)


class VisibleFormatter(logging.Formatter):
    """Log records as :func:`visible` text."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def log_as(who: str, level: int | str = logging.INFO) -> None:
    """Log from this child process, named `who`, to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(VisibleFormatter(f"%(asctime)s %(levelname)s {who}: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])
