"""Changes of the state within a round: offers, the group, reports, the decision, digests of anchors."""

from __future__ import annotations

from dataclasses import replace

from coordinator.state.apply_peers import follow, mark_absent
from coordinator.state.apply_plans import with_lifecycles
from coordinator.state.events import (
    AnchorDiverged,
    DigestAttested,
    GroupClosed,
    HoldingsReported,
    PayloadOffered,
    PayloadRejected,
    PayloadWithheld,
    StageEvent,
)
from coordinator.state.state import KEPT_ROUNDS, Round, State
from protocol.types import Decision, ExchangeGroup, Part


def offer(state: State, event: PayloadOffered) -> State:
    descriptor = event.descriptor
    key = (descriptor.stage, descriptor.round_number)
    round_state = state.round_of(*key)
    offers = {**round_state.offers, descriptor.owner: descriptor}
    # The first offer at any stage starts the time that the others have.
    opened_at = event.at if state.opened_at is None else state.opened_at
    return replace(
        state, rounds={**state.rounds, key: replace(round_state, offers=offers)}, opened_at=opened_at
    )


def withhold(state: State, event: PayloadWithheld) -> State:
    round_state = state.round_of(event.stage, event.round_number)
    return _with_round(state, event, replace(round_state, withheld=round_state.withheld | {event.peer}))


def reject(state: State, event: PayloadRejected) -> State:
    round_state = state.round_of(event.stage, event.round_number)
    reasons = {**round_state.rejections.get(event.owner, {}), event.peer: event.reason}
    rejections = {**round_state.rejections, event.owner: reasons}
    return _with_round(state, event, replace(round_state, rejections=rejections))


def close_group(state: State, event: GroupClosed) -> State:
    round_state = state.round_of(event.stage, event.round_number)
    # Canonical order: every replica sums the payloads in this order, so that anchors are bit-equal.
    descriptors = (round_state.offers[owner] for owner in sorted(round_state.offers))
    agreeing = tuple(d for d in descriptors if d.anchor_digest == event.anchor_digest)
    group = ExchangeGroup(event.group_id, agreeing, event.seconds)
    return _with_round(state, event, replace(round_state, group=group, closed_at=event.at))


def report(state: State, event: HoldingsReported) -> State:
    round_state = state.round_of(event.stage, event.round_number)
    gathered_in = round_state.gathered_in
    # A restart within the exchange would measure the time that the coordinator was away.
    if round_state.group is not None and round_state.closed_at >= state.started_at:
        gathered_in = max(gathered_in, event.at - round_state.closed_at)
    reports = {**round_state.reports, event.peer: frozenset(event.owners)}
    return _with_round(state, event, replace(round_state, reports=reports, gathered_in=gathered_in))


def _with_round(state: State, event: StageEvent, round_state: Round) -> State:
    return replace(state, rounds={**state.rounds, (event.stage, event.round_number): round_state})


def decide(state: State, at: float, decision: Decision) -> State:
    round_number = decision.round_number
    state = replace(
        state,
        decisions={**state.decisions, (decision.stage, round_number): decision},
        committed=state.committed + decision.committed,
        opened_at=at if state.opened_at is None else state.opened_at,
    )
    if state.retreats or state.failures:
        state = _forgive_failures(state, decision)
    if any((stage, round_number) not in state.decisions for stage in range(state.stages)):
        return state  # a round ends for all stages at once
    oldest = round_number + 1 - KEPT_ROUNDS
    state = replace(
        state,
        current_round=round_number + 1,
        began_at=at,
        opened_at=None,
        rounds={key: round_state for key, round_state in state.rounds.items() if key[1] >= oldest},
    )
    digests = {key: digests for key, digests in state.digests.items() if state.keeps_digests(key[1])}
    newest = state.plans[-1]
    if newest.from_round == round_number + 1:
        # Now peers without an assignment in the new plan have finished their last round.
        assignments = state.assignments[newest.epoch]
        state = replace(state, peers=with_lifecycles(state, frozenset(), assignments.keys()))
    return replace(state, digests=digests)


def _forgive_failures(state: State, decision: Decision) -> State:
    """A committed payload takes one failure off its owner, and all retreats off its replica."""
    failures, retreats = dict(state.failures), dict(state.retreats)
    for entry in decision.entries:
        peer = entry.descriptor.owner
        assignment = state.assignment(peer, decision.round_number)
        if assignment is None:
            continue
        retreats.pop(assignment.replica.index, None)
        # A member with several stages has one payload for each. Only that of its first stage counts.
        if peer in failures and decision.stage == assignment.member.stages.first:
            times, last = failures.pop(peer)
            if times > 1:
                failures[peer] = (times - 1, last)
    return replace(state, retreats=retreats, failures=failures)


def attest(state: State, event: DigestAttested) -> State:
    """The digest counts as right. If it is wrong, AnchorDiverged follows at once."""
    key = (event.stage, event.round_number, event.part)
    digests = state.digests.get(key, {})
    if digests.get(event.peer, event.digest) != event.digest:
        # On a tie the digest attested first stands, so a peer that changes its digest moves to the end.
        digests = {peer: digest for peer, digest in digests.items() if peer != event.peer}
    state = replace(state, digests={**state.digests, key: {**digests, event.peer: event.digest}})
    if event.part == Part.STAGE:
        rounds = state.synced.get(event.peer, {})
        newest = max(event.round_number, rounds.get(event.stage, 0))
        state = replace(state, synced={**state.synced, event.peer: {**rounds, event.stage: newest}})
    if state.diverged:
        # A later anchor contains the earlier ones, so it also heals divergences of earlier rounds.
        healed = {
            (peer, stage, round_number, part)
            for peer, stage, round_number, part in state.diverged
            if (peer, stage, part) == (event.peer, event.stage, event.part)
            and round_number <= event.round_number
        }
        state = replace(state, diverged=state.diverged - healed)
    return state


def diverge(state: State, event: AnchorDiverged) -> State:
    found = (event.peer, event.stage, event.round_number, event.part)
    rounds = state.synced.get(event.peer, {})
    # Every member needs the embedding, so a peer with a wrong one is in sync with no stage.
    still = {stage: n for stage, n in rounds.items() if event.part == Part.STAGE and stage != event.stage}
    state = replace(state, diverged=state.diverged | {found}, synced={**state.synced, event.peer: still})
    return follow(mark_absent(state, event.peer), event.peer)
