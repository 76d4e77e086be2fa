"""The sentence of each finding, for people."""

from __future__ import annotations

from coordinator.run.state.text import listed, short
from protocol.status import HealthFinding, Sign


def sentence(round_number: int, it: HealthFinding, replicas: int, stages: int) -> str:
    """What `it` says of a round with so many replicas in its plan and stages with measured payloads."""
    return f"Round {round_number}: {_text(it, replicas, stages)}."


def _text(it: HealthFinding, replicas: int, stages: int) -> str:  # noqa: PLR0911
    value, usual = it.value or 0.0, it.usual or 0.0
    at = f"stage {it.stages[0]}" if len(it.stages) == 1 else f"{len(it.stages)} of {stages} stages"
    who = short(it.peers[0]) if it.peers else "the replicas"
    match it.sign:
        case Sign.LOSS:
            named = listed([f"replica-{index}" for index in it.replicas])
            rose = f"rose to {value:.3f} from a level of {usual:.3f} ({_far(it)})"
            what = "is not a finite number" if it.value is None else rose
            return f"the validation loss of {named} {what}; {len(it.replicas)} of {replicas} replicas"
        case Sign.AGREEMENT if it.peers:
            far = f"{_far(it)} below"
            return f"at {at} the payloads of {who} agree {value:.2f} times as much as is usual ({far})"
        case Sign.AGREEMENT:
            fell = f"fell to {value:.3f} from {usual:.3f}"
            return f"at {at} the payloads hardly agree any more, for two rounds: their median cosine {fell}"
        case Sign.NORM if it.peers:
            return f"at {at} the payload of {who} has a norm of {value:.3g}, the median is {usual:.3g}"
        case Sign.NORM:
            how = "rose" if value > usual else "fell"
            lasts = ", for two rounds" if it.raises_alarm else ""
            return f"at {at} the median norm of the payloads {how} to {value:.3g} from {usual:.3g}{lasts}"
        case Sign.ERROR_FEEDBACK:
            share = f"{value:.0%} of what {who} propose, before it was {usual:.0%}"
            return f"error feedback makes up {share}: much of what is learned is not sent"
        case Sign.KINDS:
            cosines = f"their cosine is {value:.3f}, within each kind it is {usual:.3f}"
            return f"at {at} full and pipeline replicas pull against each other: {cosines}"


def _far(it: HealthFinding) -> str:
    return f"{it.sigmas:.0f} sigma" if it.sigmas < 100 else "more than 100 sigma"
