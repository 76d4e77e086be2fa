"""What the exchange of a run adds to the rules of a round; ``outer.exchange`` names it.

:class:`Settlement` is that of members who gather each other's payloads. It is the base of all others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module

from coordinator.run.state.commands import Report
from coordinator.run.state.lines import with_most_uplink
from coordinator.run.state.records import Round
from coordinator.run.state.state import State
from protocol.math.gathering import schedule_of
from protocol.spec.exchanges import EXCHANGES
from protocol.spec.outer import OuterSpec
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

    def traffic(
        self, outer: OuterSpec, stage: int, lines: Mapping[PeerId, MemberLine]
    ) -> dict[PeerId, tuple[float, float]]:
        """What each member of a group sends and receives in an exchange of `stage`, in payloads."""
        others, schedule = len(lines) - 1, schedule_of(str(stage), lines)
        sent = {} if schedule is None else dict(zip(schedule.members, schedule.copies, strict=True))
        return {peer: (sent.get(peer, others), others) for peer in lines}

    def download(self, outer: OuterSpec, uplinks: Mapping[PeerId, float]) -> tuple[tuple[PeerId, ...], float]:
        """Who sends what others fetch of an exchange of members with `uplinks`, and its size in payloads."""
        return with_most_uplink(uplinks), len(uplinks)

    def after(self, state: State, decision: Decision) -> Mapping[PeerId, tuple[int, int]]:
        """What :attr:`State.settled` becomes with a decision."""
        return state.settled


def settlement_of(spec: RunSpec) -> Settlement:
    """The settlement of the rounds of a run."""
    return _settlement(spec.outer.exchange)


@cache
def _settlement(exchange: str) -> Settlement:
    module, _, name = EXCHANGES[exchange].settlement.rpartition(".")
    settlement: Settlement = getattr(import_module(module), name)()
    return settlement
