"""Settings of the exchange with which a round of the same plan would be shorter, by the cost model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite

from pydantic import ValidationError

from coordinator.ops.forecast.forecast import Forecast, forecast
from coordinator.placement.cost_model import Survey
from protocol.spec.exchanges import EXCHANGES
from protocol.spec.run import RunSpec
from protocol.types import Replica

SNAPSHOT_ROUNDS = (1, 5, 10)
"""Values of link.embedding_every whose loss is measured (docs/findings.md)."""
_LEAST_GAIN = 0.02
_NEARLY = 1.01
"""Of values whose rounds are at most so much longer than the shortest round, the smallest is named."""


@dataclass(frozen=True)
class Advice:
    """A change of settings, in the order in which they are given.

    Attributes:
        setting: such as "link.embedding_every = 5".
        round_seconds: with it and those before it.
        gain: the share of the present round that all of them save.
    """

    setting: str
    round_seconds: float
    gain: float


def advice(
    spec: RunSpec, survey: Survey, replicas: Sequence[Replica], payload_bytes: Sequence[int], base: Forecast
) -> Iterator[Advice]:
    """The settings that would each save 2 % of the present round or more.

    First snapshots of the embedding: they cost no loss that can be measured. Then other exchanges.
    `base` is the forecast with `spec`.
    """

    def seconds(changed: RunSpec) -> float:
        return forecast(changed, survey, replicas, payload_bytes).round_seconds

    best, least_saved = base.round_seconds, _LEAST_GAIN * base.round_seconds
    if not isfinite(best):
        return
    if not spec.link.embedding_every and any(len(each.members) > 1 for each in replicas):
        tried = {n: _with_snapshots(spec, n) for n in SNAPSHOT_ROUNDS}
        found = {n: seconds(each) for n, each in tried.items()}
        shortest = min(found.values())
        if best - shortest >= least_saved:
            rounds = min(n for n, each in found.items() if each <= _NEARLY * shortest)
            spec, best = tried[rounds], found[rounds]
            yield Advice(f"link.embedding_every = {rounds}", best, 1 - best / base.round_seconds)
    for exchange in EXCHANGES.keys() - {spec.outer.exchange}:
        changed = _with_exchange(spec, exchange)
        if changed is not None and best - (other := seconds(changed)) >= least_saved:
            merge = ', outer.merge = "mean"' if changed.outer.merge != spec.outer.merge else ""
            yield Advice(f'outer.exchange = "{exchange}"{merge}', other, 1 - other / base.round_seconds)


def _with_snapshots(spec: RunSpec, rounds: int) -> RunSpec:
    return spec.model_copy(update={"link": spec.link.model_copy(update={"embedding_every": rounds})})


def _with_exchange(spec: RunSpec, exchange: str) -> RunSpec | None:
    """The same run with another exchange, of means, which each can; None where settings forbid that."""
    tree = spec.model_dump(mode="json")
    tree["outer"] |= {"exchange": exchange, "merge": "mean"}
    try:
        return RunSpec.model_validate(tree)
    except ValidationError:
        return None
