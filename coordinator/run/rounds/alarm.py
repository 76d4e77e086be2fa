"""The alarm of a run: it is an event of the log, and the operator decides what follows."""

from __future__ import annotations

from coordinator.run.state.commands import RaiseAlarm
from coordinator.run.state.events import AlarmRaised
from coordinator.run.state.transaction import Transaction
from protocol.status import RunPhase


def raise_alarm(transaction: Transaction, command: RaiseAlarm) -> bool:
    """Record an alarm of a run that trains. Returns False if there was one of this or a later round."""
    state = transaction.state
    known = 0 if state.alarm is None else state.alarm.round_number
    if state.phase is not RunPhase.TRAINING or command.round_number <= known:
        return False
    round_number, last_healthy = command.round_number, command.last_healthy
    transaction.add(AlarmRaised(transaction.now, round_number, last_healthy, command.reason))
    return True
