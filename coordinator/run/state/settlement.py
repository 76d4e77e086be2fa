"""What the exchange of a run adds to the rules of a round; ``outer.exchange`` names it.

:class:`Settlement` is that of members who gather each other's payloads. It is the base of all others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pkgutil import resolve_name

from coordinator.run.state.commands import Report
from coordinator.run.state.records import Round
from coordinator.run.state.state import State
from protocol.spec.exchanges import EXCHANGES
from protocol.spec.run import RunSpec
from protocol.types import (
    CommittedResult,
    Decision,
    ExchangeGroup,
    ManifestEntry,
    MemberLine,
    PayloadDescriptor,
    PeerId,
)


@dataclass(frozen=True)
class SettledResult:
    """One result on which a group has agreed in place of its payloads: `entries` are the payloads in it.

    Both are empty where too few hold the same result. `reason` is a sentence.
    """

    result: CommittedResult | None
    entries: tuple[ManifestEntry, ...]
    reason: str


class Settlement:
    """The members of a group gather all payloads. The coordinator commits those that enough of them hold."""

    def lines(
        self, state: State, descriptors: Sequence[PayloadDescriptor], lines: Sequence[MemberLine]
    ) -> tuple[MemberLine, ...]:
        """The lines that the members of a group are told; empty where they need none."""
        return tuple(lines) if any(line.uplink for line in lines) else ()

    def work(self, nbytes: int) -> int:
        """What the time of an exchange grows with, if the payloads of the group have `nbytes` bytes."""
        return nbytes

    def fault_of(self, state: State, report: Report) -> str:
        """Why the result that a member reports cannot be one of its group; "" if it can."""
        return "" if report.result is None else f"{report.peer} reports a result in a run that gathers"

    def agreement(self, state: State, round_state: Round, group: ExchangeGroup) -> SettledResult | None:
        """What a group that may be decided has agreed on; None where each payload is decided by itself."""
        return None

    def after(self, state: State, decision: Decision) -> Mapping[PeerId, tuple[int, int]]:
        """What :attr:`State.settlement_notes` becomes with a decision."""
        return state.settlement_notes


def settlement_of(spec: RunSpec) -> Settlement:
    """The settlement of the rounds of a run."""
    return _settlement(spec.outer.exchange)


@cache
def _settlement(exchange: str) -> Settlement:
    settlement: Settlement = resolve_name(EXCHANGES[exchange].settlement)()
    return settlement
