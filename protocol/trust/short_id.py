"""Short forms of the ids of peers and runs, which people copy from one command to the next."""

from __future__ import annotations

from collections.abc import Iterable

from protocol.errors import ErrorCode, HetnodeError

_LEAST_LETTERS, _MOST_CHOICES = 4, 8


def named_by(text: str, known: Iterable[str], what: str) -> str:
    """The one of `known` that `text` is or that begins or ends with `text`; `text` where there is none.

    Raises HetnodeError BAD_OPTION with the choices if there are several.
    """
    part = text.removeprefix("..")
    ends = len(part) >= _LEAST_LETTERS
    found = sorted({each for each in known if ends and (each.startswith(part) or each.endswith(part))})
    if part in found or len(found) < 2:
        return part if part in found else (found or [text])[0]
    choices = ", ".join(found[:_MOST_CHOICES]) + (", ..." if len(found) > _MOST_CHOICES else "")
    cause = f"{text!r:.80} may be each of {len(found)} {what}: {choices}."
    raise HetnodeError(ErrorCode.BAD_OPTION, cause, "Give more of one.")
