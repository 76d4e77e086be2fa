"""The sentence of each kind of finding."""

from __future__ import annotations

import pytest

from coordinator.ops.health.sentences import sentence
from protocol.status import HealthFinding, Sign
from protocol.types import PeerId

PEERS = (PeerId("a-peer-1"),)


@pytest.mark.parametrize(
    ("finding", "text"),
    [
        (
            HealthFinding(Sign.LOSS, replicas=(0, 2), value=9.0, usual=3.0, sigmas=40.0),
            "the validation loss of replica-0, replica-2 rose to 9.000 from a level of 3.000 (40 sigma); 2 "
            "of 4 replicas",
        ),
        (
            HealthFinding(Sign.LOSS, replicas=(1,)),
            "the validation loss of replica-1 is not a finite number; 1 of 4 replicas",
        ),
        (
            HealthFinding(Sign.AGREEMENT, stages=(1,), peers=PEERS, value=0.1, sigmas=200.0),
            "at stage 1 the payloads of ..a-peer-1 agree 0.10 times as much as is usual (more than 100 "
            "sigma below)",
        ),
        (
            HealthFinding(Sign.AGREEMENT, stages=(0, 1), value=0.001, usual=0.2),
            "at 2 of 2 stages the payloads hardly agree any more, for two rounds: their median cosine fell "
            "to 0.001 from 0.200",
        ),
        (
            HealthFinding(Sign.NORM, stages=(1,), peers=PEERS, value=100.0, usual=0.5),
            "at stage 1 the payload of ..a-peer-1 has a norm of 100, the median is 0.5",
        ),
        (
            HealthFinding(Sign.NORM, stages=(0,), value=100.0, usual=0.5, raises_alarm=True),
            "at stage 0 the median norm of the payloads rose to 100 from 0.5, for two rounds",
        ),
        (
            HealthFinding(Sign.ERROR_FEEDBACK, value=0.9, usual=0.3),
            "error feedback makes up 90% of what the replicas propose, before it was 30%: much of what is "
            "learned is not sent",
        ),
        (
            HealthFinding(Sign.KINDS, stages=(0,), value=-0.08, usual=0.1),
            "at stage 0 full and pipeline replicas pull against each other: their cosine is -0.080, within "
            "each kind it is 0.100",
        ),
    ],
)
def test_findings_are_told_with_their_figures(finding: HealthFinding, text: str) -> None:
    assert sentence(7, finding, replicas=4, stages=2) == f"Round 7: {text}."
