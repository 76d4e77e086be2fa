"""The operator or an alarm pauses the run, and the operator resumes it."""

from __future__ import annotations

from coordinator.membership.validation import bad_request
from coordinator.placement.replan import next_plan
from coordinator.run.rounds.rounds import is_stalled
from coordinator.run.state.commands import PauseRun, RaiseAlarm, ResumeRun
from coordinator.run.state.events import AlarmRaised, PlanAdopted, RunPaused, RunResumed
from coordinator.run.state.transaction import Transaction
from protocol.status import RunPhase
from protocol.types import PausedBy, Plan


def raise_alarm(transaction: Transaction, command: RaiseAlarm) -> None:
    """Record an alarm of a run that trains, unless there was one of this or a later round.

    The operator decides what follows, but for the pause that the command may ask for.
    """
    state = transaction.state
    known = 0 if state.alarm is None else state.alarm.round_number
    if state.phase is not RunPhase.TRAINING or command.round_number <= known:
        return
    told = command.round_number, command.last_healthy, command.reason
    transaction.add(AlarmRaised(transaction.now, *told))
    if command.pauses:
        pause(transaction, PauseRun(PausedBy.ALARM, command.reason))


def pause(transaction: Transaction, command: PauseRun) -> None:
    """Let the open round end, and no other begin. No effect on a run that is paused already.

    A round without a complete replica has not begun: it waits, too, if its replicas come back.

    Raises HetnodeError BAD_REQUEST if the run has finished.
    """
    state = transaction.state
    if state.phase is RunPhase.FINISHED:
        raise bad_request("the run has finished")
    if state.pause is not None:
        return
    is_open = state.current_round > 0 and not is_stalled(state)
    from_round = max(1, state.current_round + is_open)
    transaction.add(RunPaused(transaction.now, from_round, command.by, command.reason))


def resume(transaction: Transaction, _: ResumeRun) -> None:
    """Let the run go on. No effect on a run that is not paused.

    If peers came or left during the pause, the round begins with another plan.
    """
    state = transaction.state
    if state.pause is None:
        return
    was_held = state.is_held
    transaction.add(RunResumed(transaction.now))
    round_number = state.current_round
    # A stall ends by a rule of its own, which also waits between two attempts.
    if not was_held or not 1 <= round_number <= state.spec.rounds or is_stalled(state):
        return
    successor = next_plan(transaction.state, round_number)
    if isinstance(successor, Plan):
        transaction.add(PlanAdopted(transaction.now, successor))
