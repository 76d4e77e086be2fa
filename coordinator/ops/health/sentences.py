"""The sentence of each finding, for people."""

from __future__ import annotations

from coordinator.base.phrases import listed, short
from protocol.status import HealthFinding, Sign


def sentence(round_number: int, finding: HealthFinding, replicas: int, stages: int) -> str:
    """The sentence of a finding in a round whose plan has `replicas`, and in which `stages` were measured."""
    return f"Round {round_number}: {_text(finding, replicas, stages)}."


def _text(finding: HealthFinding, replicas: int, stages: int) -> str:  # noqa: PLR0911
    value, usual = finding.value or 0.0, finding.usual or 0.0
    where = finding.stages
    at = f"stage {where[0]}" if len(where) == 1 else f"{len(where)} of {stages} stages"
    who = short(finding.peers[0]) if finding.peers else "the replicas"
    match finding.sign:
        case Sign.LOSS:
            named = listed([f"replica-{index}" for index in finding.replicas])
            rose = f"rose to {value:.3f} from a level of {usual:.3f} ({_far(finding)})"
            what = "is not a finite number" if finding.value is None else rose
            return f"the validation loss of {named} {what}; {len(finding.replicas)} of {replicas} replicas"
        case Sign.AGREEMENT if finding.peers:
            far = f"{_far(finding)} below"
            return f"at {at} the payloads of {who} agree {value:.2f} times as much as is usual ({far})"
        case Sign.AGREEMENT:
            fell = f"fell to {value:.3f} from {usual:.3f}"
            return f"at {at} the payloads hardly agree any more, for two rounds: their median cosine {fell}"
        case Sign.NORM if finding.peers:
            return f"at {at} the payload of {who} has a norm of {value:.3g}, the median is {usual:.3g}"
        case Sign.NORM:
            how = "rose" if value > usual else "fell"
            lasts = ", for two rounds" if finding.raises_alarm else ""
            return f"at {at} the median norm of the payloads {how} to {value:.3g} from {usual:.3g}{lasts}"
        case Sign.ERROR_FEEDBACK:
            share = f"{value:.0%} of what {who} propose, before it was {usual:.0%}"
            return f"error feedback makes up {share}: much of what is learned is not sent"
        case Sign.KINDS:
            cosines = f"their cosine is {value:.3f}, within each kind it is {usual:.3f}"
            return f"at {at} full and pipeline replicas pull against each other: {cosines}"


def _far(finding: HealthFinding) -> str:
    return f"{finding.sigmas:.0f} sigma" if finding.sigmas < 100 else "more than 100 sigma"
