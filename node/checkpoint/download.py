"""Downloads of checkpoints: decides which donor is asked for which piece. It does no IO and has no clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from protocol.types import PeerId, StateRecord

PATIENCE = 6
"""A donor is not asked again after this number of failures in a row."""
LONG_PATIENCE = 30
"""The same for a donor that has sent a piece: where all fail, the own line may be dead for a minute."""

_MOST_ASKED = 2  # donors asked for one piece at the same time; each further one would only waste bandwidth


def list_reasons(reasons: Mapping[str, str]) -> str:
    """The reasons of failure by peer, for a message."""
    return "; ".join(f"{peer}: {reason}" for peer, reason in reasons.items()) or "no answer in time"


class TransferError(Exception):
    """What was asked for did not arrive as announced; the message says why."""


class WrongBytes(TransferError):
    """The sender sent bytes that are not the announced ones. No failure of the connection causes this."""


@dataclass(frozen=True)
class CheckpointDownload:
    """One part of a checkpoint, and the peers that have it.

    Attributes:
        record: signed by the coordinator.
        donors: the peers to ask, and for each peer one stage that it hosts.
        nbytes, header: of the part, from the spec (protocol.math.digest); more bytes are never accepted.
        into: the file to write; its folder is created if necessary.
    """

    record: StateRecord
    donors: Mapping[PeerId, int]
    nbytes: int
    header: str
    into: Path


@dataclass
class Donor:
    """The failures of one donor since its last success, and the reason of the newest one."""

    failures: int = 0
    reason: str = ""
    has_sent: bool = False
    is_out: bool = False  # never asked again


class Donors:
    """The peers that hold a checkpoint, and the failures of each peer. Several downloads may share it."""

    def __init__(self, names: Iterable[str]) -> None:
        self._donors = {name: Donor() for name in names}

    def __getitem__(self, name: str) -> Donor:
        return self._donors[name]

    def __len__(self) -> int:
        return len(self._donors)

    @property
    def usable(self) -> tuple[str, ...]:
        return tuple(name for name, donor in self._donors.items() if not donor.is_out)

    @property
    def reasons(self) -> Mapping[str, str]:
        """The newest failure of each donor that has failed."""
        return {name: donor.reason for name, donor in self._donors.items() if donor.reason}


@dataclass
class Download:
    """The missing pieces of a download, and the donors that have been asked for each.

    At first one donor is asked for each piece, in the order of the pieces. Then an idle donor is asked for a
    piece that another donor has not sent yet, so that the slowest donor does not delay the end.
    """

    missing: set[int]
    donors: Donors
    _asked: dict[int, set[str]] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        return not self.missing

    @property
    def is_hopeless(self) -> bool:
        return bool(self.missing) and not self.donors.usable

    def next_for(self, donor: str) -> int | None:
        """Choose the next piece to ask `donor` for; None if there is none for it at the moment."""
        if self.donors[donor].is_out:
            return None
        free = [
            (len(asked), piece)
            for piece in self.missing
            if donor not in (asked := self._asked.get(piece, ())) and len(asked) < _MOST_ASKED
        ]
        if not free:
            return None
        _, piece = min(free)  # first the pieces that no donor was asked for
        self._asked.setdefault(piece, set()).add(donor)
        return piece

    def arrived(self, donor: str, piece: int) -> None:
        """Note that `piece` of `donor` is verified and stored."""
        self.missing.discard(piece)
        self._asked.pop(piece, None)
        self.donors[donor].failures, self.donors[donor].has_sent = 0, True

    def failed(self, donor: str, piece: int, reason: str, has_lied: bool = False) -> None:
        """Note that `donor` did not send `piece`, or sent other bytes (`has_lied`): then it is out."""
        self._asked.get(piece, set()).discard(donor)
        known = self.donors[donor]
        if known.is_out:
            return  # answers that were under way may still fail; keep the reason that excluded this donor
        known.failures += 1
        known.reason = reason
        known.is_out = has_lied or known.failures >= (LONG_PATIENCE if known.has_sent else PATIENCE)
