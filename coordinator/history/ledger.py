"""The credit of every peer, counted from the events of a run: exact at every row of its log.

The same events always give the same ledger, so a receipt can be counted again from a copy of the log.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from coordinator.history.planned import Planned, PlansKept
from coordinator.state import events
from coordinator.state.events import Event
from protocol.spec.run import RunSpec
from protocol.types import Decision, PeerId

MOST_LEADERS = 1000


@dataclass(frozen=True)
class Earned:
    """What one peer has earned, as in :class:`coordinator.history.peer_records.Credit`; nothing measured."""

    stage_tokens: int = 0
    stage_rounds: int = 0
    payload_bytes: int = 0
    first_round: int = 0
    last_round: int = 0


@dataclass(frozen=True)
class Leader:
    """A peer that has chosen a public name. Two may have the same: show the end of `peer` beside it."""

    peer: PeerId
    name: str
    earned: Earned


@dataclass(frozen=True)
class Leaderboard:
    """The peers with a public name, most stage tokens first, and all others together.

    `named` and `unnamed` count peers with credit; `leaders` are at most as many as were asked for.
    """

    leaders: tuple[Leader, ...]
    named: int
    named_tokens: int
    unnamed: int
    unnamed_tokens: int


@dataclass(frozen=True)
class LedgerRecord:
    """All that a ledger knows after so many `rows`."""

    rows: int = 0
    plans: PlansKept = ()
    earned: Mapping[PeerId, Earned] = field(default_factory=dict)
    names: Mapping[PeerId, str] = field(default_factory=dict)


class Ledger:
    """Counts the credit of one run. Give it every stored event, in order, or those after `former`.

    Attributes:
        rows: events so far.
    """

    def __init__(self, spec: RunSpec, former: LedgerRecord = LedgerRecord()) -> None:
        self.rows = former.rows
        self._planned = Planned(spec, former.plans)
        self._earned, self._names = dict(former.earned), dict(former.names)

    @property
    def known(self) -> LedgerRecord:
        """What it knows; later events do not change it."""
        return LedgerRecord(self.rows, self._planned.plans, dict(self._earned), dict(self._names))

    def record(self, event: Event) -> None:
        self.rows += 1
        match event:
            case events.PlanAdopted():
                self._planned.add(event.plan, self.rows)
            case events.RoundCommitted():
                self._credit(event.decision)
            case events.PeerNamed():
                self._names[event.peer] = event.name

    def of(self, peer: PeerId) -> Earned:
        return self._earned.get(peer, Earned())

    def name_of(self, peer: PeerId) -> str:
        """The public name of `peer`, or ""."""
        return self._names.get(peer, "")

    def leaderboard(self, most: int = 100) -> Leaderboard:
        """The public page of credit. May be called from any thread while another one records events."""
        earned_by = list(self._earned.items())  # a copy in one step
        named = [Leader(peer, name, earned) for peer, earned in earned_by if (name := self.name_of(peer))]
        named.sort(key=lambda leader: (-leader.earned.stage_tokens, leader.peer))
        named_tokens = sum(leader.earned.stage_tokens for leader in named)
        return Leaderboard(
            leaders=tuple(named[: min(most, MOST_LEADERS)]),
            named=len(named),
            named_tokens=named_tokens,
            unnamed=len(earned_by) - len(named),
            unnamed_tokens=sum(earned.stage_tokens for _, earned in earned_by) - named_tokens,
        )

    def _credit(self, decision: Decision) -> None:
        for descriptor in (entry.descriptor for entry in decision.entries):
            former = self.of(descriptor.owner)
            self._earned[descriptor.owner] = replace(
                former,
                stage_tokens=former.stage_tokens + self._planned.tokens_of(descriptor),
                stage_rounds=former.stage_rounds + 1,
                payload_bytes=former.payload_bytes + descriptor.nbytes,
                first_round=former.first_round or decision.round_number,
                last_round=max(former.last_round, decision.round_number),
            )
