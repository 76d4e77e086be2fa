"""Which piece of a download comes from which donor next: decisions only, no IO and no clock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

PATIENCE = 6
"""After this number of failures in a row a donor is given up."""

_MOST_ASKED = 2


@dataclass
class _Donor:
    failures: int = 0  # in a row
    reason: str = ""
    is_out: bool = False


class Donors:
    """The peers that hold a checkpoint, and the failures of each; used for several downloads."""

    def __init__(self, names: Iterable[str]) -> None:
        self._donors = {name: _Donor() for name in names}

    def __iter__(self) -> Iterator[str]:
        return iter(self._donors)

    @property
    def usable(self) -> tuple[str, ...]:
        """The donors that may still be asked."""
        return tuple(name for name, donor in self._donors.items() if not donor.is_out)

    @property
    def reasons(self) -> Mapping[str, str]:
        """Why the donors that failed did; the newest reason of each."""
        return {name: donor.reason for name, donor in self._donors.items() if donor.reason}

    def may_be_asked(self, donor: str) -> bool:
        return not self._donors[donor].is_out

    def failures(self, donor: str) -> int:
        """How often in a row `donor` has failed."""
        return self._donors[donor].failures

    def succeeded(self, donor: str) -> None:
        self._donors[donor].failures = 0

    def failed(self, donor: str, reason: str, has_lied: bool) -> None:
        """Note a failure. A donor that has sent wrong bytes is never asked again."""
        known = self._donors[donor]
        if known.is_out:
            return  # its other answers may still arrive; keep the reason for which it was given up
        known.failures += 1
        known.reason = reason
        known.is_out = has_lied or known.failures >= PATIENCE


@dataclass
class Download:
    """The missing pieces of a download, and the donors that have been asked for each.

    Each piece is asked of one donor, the lowest first. When all pieces are on their way, an idle donor is
    asked for a piece that another one has not sent yet, so that the slowest donor does not delay the end.
    """

    missing: set[int]
    donors: Donors
    _asked: dict[int, set[str]] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        return not self.missing

    @property
    def is_hopeless(self) -> bool:
        """No donor is left to ask."""
        return bool(self.missing) and not self.donors.usable

    def next_for(self, donor: str) -> int | None:
        """The piece to ask `donor` for, noted as asked; None when there is none for it at the moment."""
        if not self.donors.may_be_asked(donor):
            return None
        free = [
            (len(asked), piece)
            for piece in self.missing
            if donor not in (asked := self._asked.get(piece, ())) and len(asked) < _MOST_ASKED
        ]
        if not free:
            return None
        _, piece = min(free)
        self._asked.setdefault(piece, set()).add(donor)
        return piece

    def arrived(self, donor: str, piece: int) -> None:
        """`piece` has come from `donor`, is verified and is stored."""
        self.missing.discard(piece)
        self._asked.pop(piece, None)
        self.donors.succeeded(donor)

    def failed(self, donor: str, piece: int, reason: str, has_lied: bool = False) -> None:
        """`donor` did not send `piece`, or `has_lied`: sent other bytes."""
        self._asked.get(piece, set()).discard(donor)
        self.donors.failed(donor, reason, has_lied)
