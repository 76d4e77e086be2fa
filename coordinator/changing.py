"""The operator changes settings of a run that trains: from which round on they hold, and what is refused."""

from __future__ import annotations

from coordinator.run.state.commands import ChangeRun
from coordinator.run.state.events import RunChanged
from coordinator.run.state.state import State
from coordinator.run.state.transaction import Transaction
from protocol.errors import ErrorCode, HetnodeError
from protocol.spec.change import MOST_CHANGES, changed, restored
from protocol.spec.run import RunSpec
from protocol.status import RunPhase
from protocol.types import RunChange


def change_run(transaction: Transaction, command: ChangeRun) -> None:
    """Record a change that holds from `command.from_round` on, or from the first round that can have it.

    Raises HetnodeError: BAD_SPEC for settings that cannot change or do not fit the others; BAD_OPTION for a
    round that has begun, or that the run does not have, and where nothing would change.
    """
    state, first = transaction.state, first_round(transaction.state)
    change = RunChange(command.from_round or first, command.settings, command.reason)
    if state.phase is RunPhase.FINISHED or first > last_round(state):
        raise _refused("The run has begun its last round: nothing is left to change.", "Start another run.")
    if change.from_round < first:
        raise _refused(
            f"Round {change.from_round} has begun, or its plan is made.",
            f"Name round {first} or a later one, or none.",
        )
    _check(state, change)
    transaction.add(RunChanged(transaction.now, change))


def undo_changes(transaction: Transaction, restore_round: int, from_round: int) -> None:
    """Let settings have the values of `restore_round` again, from `from_round` on, but for the rounds.

    Changes that hold under no plan yet are still to come. Raises HetnodeError BAD_OPTION where they do not
    fit these values.
    """
    state = transaction.state
    while restore_round in state.restored:
        restore_round = state.restored[restore_round]
    held, now = state.plans[-1].changes, _planned_spec(state)
    then = [each for each in held if each.from_round <= restore_round]
    if len(then) == len(held) or from_round > now.rounds:
        return
    told = {
        _name(text) for each in _pending(state) if each.from_round <= from_round for text in each.settings
    }
    former = restored(now, changed(state.first_spec or state.spec, then))
    if settings := tuple(text for text in former if _name(text) not in told):
        change = RunChange(from_round, settings, f"the rollback to round {restore_round}")
        try:
            _check(state, change)
        except HetnodeError as error:
            cause = (
                f"A change that is to come does not fit the settings of round {restore_round}: {error.cause}"
            )
            raise _refused(cause, "Change that setting to another value before the rollback.") from None
        transaction.add(RunChanged(transaction.now, change))


def first_round(state: State) -> int:
    """The first round of which no plan is made and that no member has begun."""
    number = state.current_round
    is_decided = any((stage, number) in state.decisions for stage in range(state.stages))
    return number + 1 + is_decided


def last_round(state: State) -> int:
    """The number of rounds, with the changes to come."""
    return changed(_planned_spec(state), _pending(state)).rounds


def _check(state: State, change: RunChange) -> None:
    """Raises HetnodeError where `change` and those to come do not fit one another, or nothing changes."""
    if len(state.changes) >= MOST_CHANGES:
        raise _refused(f"The run was changed {MOST_CHANGES} times, which is the most.", "Start another run.")
    spec = _planned_spec(state)
    for each in sorted((*_pending(state), change), key=lambda each: each.from_round):
        then = changed(spec, [each])
        if then.rounds < each.from_round or spec.rounds < each.from_round:
            last = min(then.rounds, spec.rounds)
            raise _refused(f"The run would end with round {last}, before the change.", "Name other rounds.")
        if each is change and then.model_copy(update={"began_as": spec.began_as}) == spec:
            raise _refused("The run has these values already.", "'hetnode status' shows its settings.")
        spec = then


def _pending(state: State) -> tuple[RunChange, ...]:
    """The changes that hold under no plan yet."""
    return state.changes[len(state.plans[-1].changes) if state.plans else 0 :]


def _planned_spec(state: State) -> RunSpec:
    """The specification under the newest plan."""
    return state.spec_under(state.plans[-1]) if state.plans else state.spec


def _name(setting: str) -> str:
    return setting.partition("=")[0]


def _refused(cause: str, remedy: str) -> HetnodeError:
    return HetnodeError(ErrorCode.BAD_OPTION, cause, remedy)
