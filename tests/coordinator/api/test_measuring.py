"""A peer is believed only about the payload that it measures, and only what a payload can have."""

from __future__ import annotations

import math

import pytest

from coordinator.api.measuring import believed
from coordinator.run.state.state import State
from protocol.status import Measurement, PayloadAgreement
from protocol.types import Aborted, Committed, Decision, ManifestEntry, PeerId
from tests.builders import keyed, spec_of

PEERS = sorted((keyed(number) for number in range(3)), key=lambda each: each.peer)
FIRST, SECOND, THIRD = (each.peer for each in PEERS)


def decision(stage: int, committed: bool = True) -> Decision:
    entries = tuple(ManifestEntry(each.payload(spec_of(), stage, 1), (each.peer,)) for each in PEERS)
    common = stage, 1, 1, "a test"
    return Committed(*common, entries) if committed else Aborted(*common)


STATE = State(spec_of(), "run", decisions={(0, 1): decision(0), (1, 1): decision(1, committed=False)})


def told(
    *agreements: PayloadAgreement, peer: PeerId = FIRST, norms: tuple[float, float] = (2.0, 1.0)
) -> Measurement:
    sent = Measurement(peer, 1, 0, 0, progress_norm=norms[0], error_norm=norms[1], agreements=agreements)
    return believed(STATE, sent)


GOOD = PayloadAgreement(0, SECOND, 0.5, 1.0, 0.8, alike=-0.25)


def test_figures_of_the_next_owner_are_believed() -> None:
    assert told(GOOD).agreements == (GOOD,)
    of_last = PayloadAgreement(0, FIRST, None, 1.0, 0.8)
    assert told(of_last, peer=THIRD).agreements == (of_last,)


@pytest.mark.parametrize(
    "bad",
    [
        PayloadAgreement(0, THIRD, 0.5, 1.0, 1.0),
        PayloadAgreement(0, FIRST, 0.5, 1.0, 1.0),
        PayloadAgreement(0, PeerId("nobody"), 0.5, 1.0, 1.0),
        PayloadAgreement(1, SECOND, 0.5, 1.0, 1.0),
        PayloadAgreement(77, SECOND, 0.5, 1.0, 1.0),
        PayloadAgreement(0, SECOND, 1.5, 1.0, 1.0),
        PayloadAgreement(0, SECOND, math.nan, 1.0, 1.0),
        PayloadAgreement(0, SECOND, 0.5, math.inf, 1.0),
        PayloadAgreement(0, SECOND, 0.5, -1.0, 1.0),
        PayloadAgreement(0, SECOND, 0.5, 1.0, 1e300),
        PayloadAgreement(0, SECOND, 0.5, 1.0, 1.0, alike=-2.0),
        PayloadAgreement(0, SECOND, 0.5, 1.0, 1.0, unlike=math.inf),
        PayloadAgreement(0, SECOND, 0.5, 1.0, 1.0, likeness=1.5),
    ],
    ids=str,
)
def test_other_figures_are_dropped_and_the_rest_is_kept(bad: PayloadAgreement) -> None:
    assert told(bad).agreements == ()
    assert told(bad, GOOD).agreements == (GOOD,)
    assert told(bad, norms=(3.0, 0.5)).error_share == pytest.approx(0.5 / 3.5)


def test_one_figure_of_a_stage_is_kept() -> None:
    assert len(told(GOOD, GOOD).agreements) == 1


@pytest.mark.parametrize("norm", [math.nan, math.inf, -1.0, 1e300])
def test_impossible_norms_are_not_kept(norm: float) -> None:
    assert told(norms=(norm, 1.0)).error_share is None
    assert told(norms=(1.0, norm)).error_share is None
    assert told(norms=(0.0, 0.0)).error_share is None
