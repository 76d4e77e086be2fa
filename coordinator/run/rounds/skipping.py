"""The stages that a round skips, because they have no turn in it (outer.turns)."""

from __future__ import annotations

from coordinator.membership.validation import bad_request
from coordinator.run.state.events import RoundDecided
from coordinator.run.state.state import State
from coordinator.run.state.transaction import Transaction
from protocol.math.turns import is_due
from protocol.types import Skipped


def check_due(state: State, stage: int, round_number: int) -> None:
    """Raises HetnodeError BAD_REQUEST if the stage has no turn in that round."""
    if not is_due(state.spec, stage, round_number):
        raise bad_request(f"stage {stage} has no turn in round {round_number}")


def skip_others(transaction: Transaction, round_number: int, epoch: int) -> None:
    """Decide that the round skips the stages without a turn. `epoch` is that of the next plan."""
    spec = transaction.state.spec
    for stage in range(spec.swarm.stages):
        if not is_due(spec, stage, round_number) and not transaction.state.is_decided(stage, round_number):
            decision = Skipped(stage, round_number, epoch, "it has no turn in this round")
            transaction.add(RoundDecided(transaction.now, decision))
