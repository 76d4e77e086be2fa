"""What members and the operator tell of the model: who may, and how much."""

from __future__ import annotations

import math

from coordinator.membership.validation import bad_request, check_not_excluded
from coordinator.run.state.events import ModelEvaluated
from coordinator.run.state.state import State
from coordinator.run.state.transaction import Transaction
from protocol.errors import ErrorCode, HetnodeError
from protocol.status import ModelEvaluation

MOST_NAMES, MOST_FIGURES, MOST_SAMPLES = 32, 16, 8
"""Names of one peer in the whole run, and figures and samples of one evaluation."""
MOST_OF_NAME, MOST_OF_TEXT = 80, 1000
"""Letters of a name or a metric, and of a prompt or a text."""


def take_evaluation(transaction: Transaction, told: ModelEvaluation) -> None:
    """Record what a peer tells, once for each name and round; what was told before has no effect.

    Raises HetnodeError: BANNED, QUARANTINED; UNKNOWN_PEER for a peer that never joined or does not count;
    BAD_REQUEST for what is out of bounds.
    """
    state = transaction.state
    _check_peer(state, told)
    _check_bounds(told)
    if not 0 <= told.round_number <= state.rounds_decided:
        raise bad_request(f"round {told.round_number} is not over, of which it tells an evaluation")
    known = state.evaluations.get(told.key)
    if known is None and sum(peer == told.peer for peer, _ in state.evaluations) >= MOST_NAMES:
        raise bad_request(f"it has told evaluations of {MOST_NAMES} names, which is the most")
    if known is None or known.round_number < told.round_number:
        transaction.add(ModelEvaluated(transaction.now, told))


def _check_peer(state: State, told: ModelEvaluation) -> None:
    check_not_excluded(state, told.peer)
    if told.peer and (told.peer not in state.peers or state.is_unproven(told.peer)):
        raise HetnodeError(
            ErrorCode.UNKNOWN_PEER,
            f"Peer {told.peer} has not joined this run, or its payloads do not count yet.",
            "Tell evaluations once it takes part.",
        )


def _check_bounds(told: ModelEvaluation) -> None:
    names = told.name, *told.figures
    if not all(0 < len(name) <= MOST_OF_NAME and name.isprintable() for name in names):
        raise bad_request(f"a name of an evaluation has 1 to {MOST_OF_NAME} printable letters")
    if len(told.figures) > MOST_FIGURES or not all(map(math.isfinite, told.figures.values())):
        raise bad_request(f"an evaluation has at most {MOST_FIGURES} figures, which are finite")
    texts = [text for each in told.samples for text in (each.prompt, each.text)]
    if len(told.samples) > MOST_SAMPLES or not all(map(_is_text, texts)):
        raise bad_request(
            f"an evaluation has at most {MOST_SAMPLES} samples, of printable lines of {MOST_OF_TEXT} letters"
        )


def _is_text(text: str) -> bool:
    return len(text) <= MOST_OF_TEXT and all(line.isprintable() for line in text.split("\n"))
