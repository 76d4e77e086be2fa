"""What is judged: the figures of one round, as far as members have measured them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from protocol.status import HealthFinding
from protocol.types import PeerId


@dataclass(frozen=True)
class PayloadFigures:
    """One payload of a (stage, round), measured by a peer that does not own it (PayloadAgreement).

    `is_full` tells the kind of its replica; None if it is not known.
    """

    stage: int
    owner: PeerId
    is_full: bool | None
    cosine: float | None
    norm: float
    mean_norm: float
    alike: float | None = None
    unlike: float | None = None


@dataclass(frozen=True)
class RoundFigures:
    """All figures of one round.

    Attributes:
        work: of the replicas of the plan, by index (protocol.math.batch).
        turn: which stages exchange, where they do so in turn.
        contributors: the owners of the payloads that count, at any stage; empty if the round has none.
        losses: validation loss of each replica that has measured it; any float.
        payloads: those that were measured.
        error_shares: of each member (Measurement.error_share).
    """

    round_number: int
    work: Mapping[int, float] = field(default_factory=dict)
    losses: Mapping[int, float] = field(default_factory=dict)
    payloads: tuple[PayloadFigures, ...] = ()
    error_shares: tuple[float, ...] = ()
    contributors: frozenset[PeerId] = frozenset()
    turn: int = 0


def same_turn(rounds: Sequence[RoundFigures]) -> list[RoundFigures]:
    """Those of `rounds` in which the same stages had their turn as in the last one."""
    return [each for each in rounds if each.turn == rounds[-1].turn]


def turnover(window: Sequence[RoundFigures], now: RoundFigures) -> float:
    """How much the contributors of `now` are others than those of the rounds of `window`: 0 to 1.

    It is the mean Jaccard distance to the rounds with contributors; 0 if there is nothing to compare.
    """
    # The members of a pipeline contribute in different turns.
    former = [each.contributors for each in window if each.contributors and each.turn == now.turn]
    if not former or not now.contributors:
        return 0.0
    shares = [len(each & now.contributors) / len(each | now.contributors) for each in former]
    return 1.0 - math.fsum(shares) / len(shares)


def by_stage(figures: RoundFigures) -> dict[int, list[PayloadFigures]]:
    """The payloads of a round, by stage."""
    found: dict[int, list[PayloadFigures]] = {}
    for each in figures.payloads:
        found.setdefault(each.stage, []).append(each)
    return found


def named_stages(found: Sequence[int], stages: Sequence[int]) -> str:
    """How a sentence names the stages `found` of `stages`."""
    return f"stage {found[0]}" if len(found) == 1 else f"{len(found)} of {len(stages)} stages"


@dataclass(frozen=True)
class Judgement:
    """The health of the run in one round.

    Attributes:
        last_healthy: the newest earlier round in which nothing pointed to the alarm yet; 0 without one.
        news: findings that the round before did not have.
    """

    round_number: int
    findings: tuple[HealthFinding, ...]
    last_healthy: int
    news: tuple[HealthFinding, ...] = ()

    @property
    def alarm(self) -> str:
        """The sentences that raise the alarm; "" without one."""
        return " ".join(each.sentence for each in self.findings if each.raises_alarm)

    @property
    def without_alarm(self) -> Judgement:
        """The same findings; none raises an alarm."""
        findings = tuple(replace(each, raises_alarm=False) for each in self.findings)
        return replace(self, findings=findings)
