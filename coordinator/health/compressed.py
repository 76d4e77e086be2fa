"""The weight of compressed replicas: what members have measured, and when it changes the next plans.

The figures are those that are believed (coordinator.health.intake), of the RECENT rounds without an alarm.
A change is an event of the log, so a plan follows from the log alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from coordinator.health.records import PayloadFigures, RoundFigures, same_kind
from coordinator.state.commands import WeighCompressed
from coordinator.state.events import CompressedWeighed
from coordinator.state.transaction import Transaction
from protocol.algorithm.compressed_weight import RECENT, PairCosine, next_weight, relative_agreement
from protocol.status import RunPhase


def measured_agreement(rounds: Sequence[RoundFigures], since: int = 0) -> float | None:
    """Of compressed payloads with full ones in the last RECENT of `rounds`; None if it cannot be told.

    Only rounds after `since` count, and those that are dense or not as the newest one is: dense payloads
    agree more.
    """
    recent = [each for each in same_kind(rounds) if each.round_number > since][-RECENT:]
    if len(recent) < RECENT:
        return None
    payloads = [each for figures in recent for each in figures.payloads]
    full = ((each, each.alike) for each in payloads if each.is_full)
    compressed = ((each, each.unlike) for each in payloads if each.is_compressed)
    return relative_agreement(_known(full), _known(compressed))


def _known(cosines: Iterator[tuple[PayloadFigures, float | None]]) -> Iterator[PairCosine]:
    return (PairCosine(each.stage, each.owner, cosine) for each, cosine in cosines if cosine is not None)


def weigh_compressed(transaction: Transaction, command: WeighCompressed) -> None:
    """Record another weight of compressed replicas, which the next plan has.

    At the earliest RECENT rounds after the last change: no round is measured for two changes.
    """
    state = transaction.state
    present = state.compressed
    is_open = state.phase is RunPhase.TRAINING and state.spec.grouping.weights == "measured"
    if not is_open or command.round_number < present.round_number + RECENT:
        return
    weight = next_weight(present.weight, command.agreement)
    if weight != present.weight:
        event = CompressedWeighed(transaction.now, command.round_number, weight, command.agreement)
        transaction.add(event)
