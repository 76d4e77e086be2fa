"""A rollback: the decisions of one round, of all stages, restore the anchors after a former round.

Round numbers only grow, and no decision changes: the rounds in between stay decided, and their samples are
not trained again. Anchors and momentum become those after the former round, bit for bit. What replicas have
learned since their last payload, their error feedback and the moments of their inner optimizers are dropped,
because they come from the rounds that the rollback undoes.

A coordinator whose folder was restored from an older copy goes on in the same way: it takes the anchors that
its peers hold after a later round. That trusts more than half of them; the history in between is lost.
"""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.base.phrases import listed
from coordinator.changing import last_round, undo_changes
from coordinator.membership.ahead import digest_ahead, kept_ahead, problem_ahead, told_ahead
from coordinator.membership.validation import bad_request
from coordinator.pausing import pause
from coordinator.run.rounds.attestation import record_of, settled_digest
from coordinator.run.rounds.rounds import adopt_next_plan, conclude
from coordinator.run.state.commands import PauseRun, RollBack
from coordinator.run.state.events import AnchorDigest, DigestAttested, RoundDecided, RunRolledBack
from coordinator.run.state.state import KEPT_ROUNDS, State
from coordinator.run.state.transaction import Transaction
from protocol.errors import ErrorCode, HetnodeError
from protocol.status import RunPhase
from protocol.types import Part, PausedBy, RolledBack


@dataclass(frozen=True)
class Restorable:
    """A round, and a sentence that says why its anchors cannot be restored now; or ""."""

    round_number: int
    problem: str


def roll_back(transaction: Transaction, command: RollBack) -> None:
    """Decide the next round of all stages as a rollback to `restore_round`, and pause the run.

    If some stages have decided the current round, the others abort it, and the rollback is the round after.

    A `restore_round` that is not decided here is adopted, and the run is not paused: the rollback is a round
    that no live peer knows yet, and the rounds up to it have no decisions here.

    Raises HetnodeError: BAD_REQUEST if no round is open; NO_ROLLBACK; BAD_OPTION where
    changes to come do not fit the former settings. Then nothing has changed.
    """
    state, restore_round = transaction.state, command.restore_round
    if state.phase is not RunPhase.TRAINING or state.current_round > state.spec.rounds:
        raise bad_request("a rollback needs a run that trains and has a round left")
    undecided = [
        stage for stage in range(state.stages) if (stage, state.current_round) not in state.decisions
    ]
    round_number = state.current_round + (len(undecided) < state.stages)
    is_ahead, last = restore_round >= state.current_round, last_round(state)
    if is_ahead:
        newest = max(told_ahead(state, restore_round + KEPT_ROUNDS), default=0)
        round_number = max(restore_round + 1, min(newest + 1, last))
        round_number += round_number == state.spec.rounds < last  # a last round has no plan after it
    if round_number > last:
        why = "decided" if is_ahead else "half decided"
        raise _refused(f"The last round of {last} is {why}.", "Its result is the last one.")
    if problem := problem_of(state, restore_round):
        possible = [str(each.round_number) for each in restorable_rounds(state) if not each.problem]
        raise _refused(
            f"The anchors after round {restore_round} cannot be restored: {problem}.",
            f"Choose another round: {listed(possible)}."
            if possible
            else "Wait until nodes that kept anchors are back.",
        )
    undo_changes(transaction, restore_round, round_number + 1)
    unknown = f"rounds {state.current_round} to {round_number - 1} are unknown here, and "
    what = f"{unknown}the run goes on from what most peers hold after" if is_ahead else "the run goes back to"
    reason = f"{what} round {restore_round}{': ' if command.reason else ''}{command.reason}"
    if not is_ahead:
        pause(transaction, PauseRun(PausedBy.OPERATOR, reason))
        for stage in undecided if len(undecided) < state.stages else ():
            conclude(transaction, stage, (), reason)
    digest_of = digest_ahead if is_ahead else settled_digest
    digests = tuple(
        AnchorDigest(stage, part, digest)
        for stage, part in _parts(state)
        if (digest := digest_of(state, stage, restore_round, part)) is not None
    )
    if is_ahead:  # or nobody could find the donors of what some members have replaced
        for each in digests:
            key = each.stage, restore_round, Part(each.part)
            for peer in kept_ahead(state, *key):
                transaction.add(DigestAttested(transaction.now, *key, peer, each.digest))
    epoch = adopt_next_plan(transaction, round_number)
    transaction.add(RunRolledBack(transaction.now, round_number, restore_round, command.reason, digests))
    for stage in range(state.stages):
        decision = RolledBack(stage, round_number, epoch, reason, restore_round)
        transaction.add(RoundDecided(transaction.now, decision))


def restorable_rounds(state: State) -> list[Restorable]:
    """The former rounds after which nodes write checkpoints, and whose digests are known; newest first.

    Before them are the rounds that peers have told of and that are not decided here.
    """
    every = state.spec.recovery.checkpoint_every
    decided = {each for _, each, _ in state.digests if 0 < each < state.current_round}
    found = {0} | {each for each in decided if each % every == 0 or each in state.restored}
    found |= told_ahead(state, last_round(state))
    return [Restorable(each, problem_of(state, each)) for each in sorted(found, reverse=True)]


def problem_of(state: State, restore_round: int) -> str:
    """Why the anchors after that round cannot be restored now, without a period; "" if they can.

    Of each stage, the digest must be settled, and a live peer that has attested it must have said in its last
    heartbeat that it keeps the anchor. Every node computes or has received the initial parameters.
    """
    if restore_round < 0:
        return f"round {restore_round} is not decided"
    if restore_round >= state.current_round:
        return problem_ahead(state, restore_round, _parts(state))
    for stage, part in _parts(state):
        record = record_of(state, stage, part, restore_round)
        if record is None or settled_digest(state, stage, restore_round, part) != record.digest:
            return f"the digest of {part} {stage} is not known any more"
        if restore_round and not any(restore_round in state.last_seen[peer].kept for peer in record.holders):
            return f"no live peer keeps {part} {stage}"
    return ""


def _parts(state: State) -> list[tuple[int, Part]]:
    parts = [(stage, Part.STAGE) for stage in range(state.stages)]
    # Without pipelines, and where links use snapshots, no peer holds the embedding alone.
    return (
        [*parts, (0, Part.EMBEDDING)] if state.stages > 1 and not state.spec.link.embedding_every else parts
    )


def _refused(cause: str, remedy: str) -> HetnodeError:
    return HetnodeError(ErrorCode.NO_ROLLBACK, cause, remedy)
