"""Results of trials that nobody has run, for tests of what is made of them."""

from __future__ import annotations

from collections.abc import Iterable

from node.experiment.results import Loss, Result
from node.experiment.trial import Planned


def result_of(planned: Planned, *losses: Loss, plain: Loss = 2.0, seconds: float = 10.0) -> Result:
    """Of `planned`, with these validation losses of its replicas at the end."""
    trial, rounds = planned.trial, planned.trial.spec.rounds
    return Result(
        key=trial.key,
        name=planned.name,
        mode=planned.mode.value,
        seed=planned.seed,
        spec=trial.portable_spec,
        variation=trial.variation.changes,
        train=tuple(5.0 - 2 * done / rounds for done in range(rounds)),
        validation={rounds: losses},
        plain=plain,
        payload_bytes=1000 * rounds,
        link_bytes=2_000_000 * rounds,
        seconds=seconds,
        device="a processor, 1 thread of 2",
        versions={"hetnode": "0.1.0", "torch": "2", "python": "3.11"},
        date="2026-01-02",
    )


def by_key(results: Iterable[Result]) -> dict[str, Result]:
    return {result.key: result for result in results}
