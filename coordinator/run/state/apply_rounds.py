"""Changes of the state within a round: offers, the group, reports, the decision, digests of anchors."""

from __future__ import annotations

from math import inf

from coordinator.base.persistent_map import PersistentMap
from coordinator.base.replacing import replace
from coordinator.run.state import events
from coordinator.run.state.apply_peers import follow, mark_absent
from coordinator.run.state.apply_plans import with_lifecycles, with_settings
from coordinator.run.state.lines import lines_of
from coordinator.run.state.records import Barren, Contest, Round, Silence
from coordinator.run.state.settlement import settlement_of
from coordinator.run.state.state import KEPT_DECISIONS, KEPT_DURATIONS, KEPT_PHASES, KEPT_ROUNDS, State
from coordinator.run.state.tokens import decided_tokens
from protocol.spec.fixed import LEAST_SHARE
from protocol.types import Committed, Decision, ExchangeGroup, Finding, Part, PeerId, RolledBack, Skipped


def offer(state: State, event: events.PayloadOffered) -> State:
    descriptor = event.descriptor
    key = (descriptor.stage, descriptor.round_number)
    round_state = state.round_of(*key)
    offers = round_state.offers.set(descriptor.owner, descriptor)
    opened_at = state.opened_at
    if opened_at is None and not state.is_weightless(descriptor.owner, descriptor.round_number):
        opened_at = event.at
    state = _answer(state, event.at, descriptor.round_number, descriptor.owner, descriptor.weight)
    assignment = state.assignment(descriptor.owner, descriptor.round_number)
    if state.failed_links and assignment is not None:  # the replica has trained, so its links are open
        replica, epoch = assignment.replica.index, state.plan_for(descriptor.round_number).epoch
        failed = {
            ends: link
            for ends, link in state.failed_links.items()
            if link.replica != replica or link.epoch > epoch or link.is_of_frames
        }
        state = replace(state, failed_links=failed)
    return replace(
        state, rounds={**state.rounds, key: replace(round_state, offers=offers)}, opened_at=opened_at
    )


def withhold(state: State, event: events.PayloadWithheld) -> State:
    round_state = state.round_of(event.stage, event.round_number)
    state = _answer(state, event.at, event.round_number, event.peer)
    return _with_round(state, event, replace(round_state, withheld=round_state.withheld | {event.peer}))


def _answer(state: State, at: float, round_number: int, peer: PeerId, weight: float = 0.0) -> State:
    """The first answer of the replica of `peer` in the round shows how long its inner phase took.

    `weight` is 0 if the replica withholds.
    """
    assignment = state.assignment(peer, round_number)
    if assignment is None or round_number != state.current_round:
        return state
    index = assignment.replica.index
    if index in state.answered or (not weight and state.has_entered(peer)):
        return state
    phases = state.phase_seconds.get(index, ())
    # What is withheld is below the least share: at its most, that can only show that the replica is slower.
    seconds = (at - state.began_at) / (weight or LEAST_SHARE * assignment.replica.weight)
    is_news = weight > 0 or seconds >= max(phases, default=inf)
    # A restart within the phase would measure the time that the coordinator was away.
    if is_news and state.began_at >= state.started_at:
        phases = (*phases, seconds)[-KEPT_PHASES:]
    return replace(
        state, answered=state.answered.set(index, at), phase_seconds=state.phase_seconds.set(index, phases)
    )


def reject(state: State, event: events.PayloadRejected) -> State:
    round_state = state.round_of(event.stage, event.round_number)
    reasons = {**round_state.rejections.get(event.owner, {}), event.peer: event.reason}
    rejections = {**round_state.rejections, event.owner: reasons}
    return _with_round(state, event, replace(round_state, rejections=rejections))


def close_group(state: State, event: events.GroupClosed) -> State:
    round_state = state.round_of(event.stage, event.round_number)
    # Canonical order: every replica sums the payloads in this order, so that anchors are bit-equal.
    descriptors = (round_state.offers[owner] for owner in sorted(round_state.offers))
    agreeing = tuple(d for d in descriptors if d.anchor_digest == event.anchor_digest)
    lines = settlement_of(state.spec).lines(state, agreeing, lines_of(state, agreeing))
    group = ExchangeGroup(event.group_id, agreeing, event.seconds, lines)
    members = frozenset(descriptor.owner for descriptor in agreeing)
    return _with_round(state, event, replace(round_state, group=group, members=members, closed_at=event.at))


def report(state: State, event: events.HoldingsReported) -> State:
    round_state = state.round_of(event.stage, event.round_number)
    gathered_in = round_state.gathered_in
    # A restart within the exchange would measure the time that the coordinator was away.
    if round_state.group is not None and round_state.closed_at >= state.started_at:
        gathered_in = max(gathered_in, event.at - round_state.closed_at)
    reports = round_state.reports.set(event.peer, owners_of(round_state, event))
    counts = round_state.report_counts.set(event.peer, round_state.report_counts.get(event.peer, 0) + 1)
    changed = replace(round_state, reports=reports, report_counts=counts, gathered_in=gathered_in)
    return _with_round(state, event, changed)


def report_result(state: State, event: events.ResultReported) -> State:
    round_state = state.round_of(event.stage, event.round_number)
    results = round_state.results.set(event.peer, event.claim)
    return _with_round(state, event, replace(round_state, results=results))


def owners_of(round_state: Round, event: events.HoldingsReported) -> frozenset[PeerId]:
    """The owners of the payloads that a member reports as held."""
    if not event.of_group:
        return frozenset(event.owners)
    # Members that hold all share one set: those of many would take hundreds of megabytes.
    return round_state.members.difference(event.lacking) if event.lacking else round_state.members


def contest(state: State, event: events.PayloadsContested) -> State:
    round_state = state.round_of(event.stage, event.round_number)
    contest = Contest(event.at, event.seconds, event.owners, event.left_out)
    return _with_round(state, event, replace(round_state, contest=contest))


def arbitrate(state: State, event: events.PayloadArbitrated) -> State:
    round_state = state.round_of(event.stage, event.round_number)
    assert round_state.contest is not None, "only a contested payload is arbitrated"
    verdicts = {**round_state.contest.verdicts, event.owner: event.verdict}
    if event.verdict.finding is Finding.NOT_FOUND:
        state = replace(state, unfound={**state.unfound, event.owner: event.round_number})
    contest = replace(round_state.contest, verdicts=verdicts)
    return _with_round(state, event, replace(round_state, contest=contest))


def _with_round(state: State, event: events.StageEvent, round_state: Round) -> State:
    return replace(state, rounds={**state.rounds, (event.stage, event.round_number): round_state})


def decide(state: State, event: events.RoundDecided) -> State:
    decision, at = event.decision, event.at
    round_number, is_committed = decision.round_number, isinstance(decision, Committed)
    state = replace(
        state,
        decisions=state.decisions.set((decision.stage, round_number), decision),
        decided=state.decided + 1,
        tokens=state.tokens + decided_tokens(state, decision),
        committed=state.committed + is_committed,
        skipped=state.skipped + isinstance(decision, Skipped),
        committed_at=at if is_committed else state.committed_at,
        opened_at=at if state.opened_at is None else state.opened_at,
    )
    if isinstance(decision, RolledBack):
        state = replace(state, silences={})
    elif not isinstance(decision, Skipped):  # of a skipped stage no answer was expected
        state = replace(state, silences=_silences(state, decision), barren=_barren(state, decision))
    state = replace(state, settlement_notes=settlement_of(state.spec).after(state, decision))
    if isinstance(decision, Committed) and (state.retreats or state.failures):
        state = _forgive_failures(state, decision)
    if any((stage, round_number) not in state.decisions for stage in range(state.stages)):
        return state  # a round ends for all stages at once
    oldest, oldest_decision = round_number + 1 - KEPT_ROUNDS, round_number + 1 - KEPT_DECISIONS
    former = state.current_round  # an earlier one where a restored coordinator goes on from what peers hold
    state = replace(
        state,
        current_round=round_number + 1,
        began_at=at,
        round_durations=_durations(state, at),
        opened_at=None,
        answered=PersistentMap(),
        breaks={},
        rounds={key: round_state for key, round_state in state.rounds.items() if key[1] >= oldest},
        decisions=state.decisions.keep(lambda key, _: key[1] >= oldest_decision),
    )
    tokens_at = {**state.tokens_at, round_number: state.tokens}
    known = {*tokens_at, *(each for _, each, _ in state.digests)}
    kept = {each for each in known if state.keeps_digests(each)}
    digests = {key: digests for key, digests in state.digests.items() if key[1] in kept}
    changes = {key: changes for key, changes in state.digest_changes.items() if key in digests}
    newest = state.plans[-1]
    if former < newest.from_round <= round_number + 1:
        # Now peers without an assignment in the new plan have finished their last round.
        assignments = state.assignments[newest.epoch]
        state = replace(state, peers=with_lifecycles(state, frozenset(), assignments.keys()))
        state = with_settings(state)
    kept_tokens = {each: tokens for each, tokens in tokens_at.items() if each in kept}
    open_ = frozenset(each for each in state.diverged if each[1:] in digests or state.peers[each[0]].is_live)
    state = replace(state, digests=digests, digest_changes=changes, diverged=open_)
    return replace(state, tokens_at=kept_tokens)


def _durations(state: State, at: float) -> tuple[float, ...]:
    """With that of the round which ends now, unless the coordinator was away in it."""
    if state.began_at < state.started_at:
        return state.round_durations
    return (*state.round_durations, at - state.began_at)[-KEPT_DURATIONS:]


def _silences(state: State, decision: Decision) -> dict[PeerId, Silence]:
    """The silences after a decision: of the members without an answer, which every round has waited for."""
    stage, round_number = decision.stage, decision.round_number
    round_state = state.round_of(stage, round_number)
    oldest = round_number - state.spec.outer.turns  # when the stages of this round were due before
    silences = dict(state.silences)
    for peer, each in state.silences.items():
        if each.last < oldest and each.recent:
            silences[peer] = Silence(0, oldest, state.began_at, each.recent, each.counted)
        elif each.last < oldest:
            del silences[peer]
    for replica in state.complete_replicas(round_number):
        peer = replica.host_of(stage).peer
        is_silent = peer not in round_state.offers and peer not in round_state.withheld
        if is_silent or peer in silences:
            former = silences.get(peer, Silence(0, round_number - 1, state.began_at))
            has_trained = bool(state.phase_seconds.get(replica.index))
            silences[peer] = former.after(round_number, is_silent, has_trained)
    return silences


def _barren(state: State, decision: Decision) -> dict[tuple[int, int], Barren]:
    """Which replicas withhold, after a decision. A silent replica is another matter."""
    stage, round_number = decision.stage, decision.round_number
    round_state = state.round_of(stage, round_number)
    if not round_state.withheld and not state.barren:
        return {}
    barren = dict(state.barren)
    for replica in state.complete_replicas(round_number):
        peer, key = replica.host_of(stage).peer, (replica.index, stage)
        # Who took its seat in this round withholds by rule, which says nothing about the replica.
        is_withheld = peer in round_state.withheld and not state.has_entered(peer)
        if is_withheld or (peer in round_state.offers and key in barren):
            former = barren.get(key, Barren(round_number - 1))
            barren[key] = former.after(round_number, is_withheld)
    return {key: each for key, each in barren.items() if each.recent}


def _forgive_failures(state: State, decision: Committed) -> State:
    """A committed payload takes one failure off its owner, and all retreats off its replica."""
    failures, retreats = dict(state.failures), dict(state.retreats)
    for entry in decision.entries:
        peer = entry.descriptor.owner
        assignment = state.assignment(peer, decision.round_number)
        if assignment is None or not state.takes_part(peer, decision.round_number):
            continue
        retreats.pop(assignment.replica.index, None)
        # A member with several stages has one payload for each. Only that of its first stage counts.
        if peer in failures and decision.stage == assignment.member.stages.first:
            times, last = failures.pop(peer)
            if times > 1:
                failures[peer] = (times - 1, last)
    return replace(state, retreats=retreats, failures=failures)


def attest(state: State, event: events.DigestAttested) -> State:
    """The digest counts as right. If it is wrong, AnchorDiverged follows at once."""
    key = (event.stage, event.round_number, event.part)
    digests = state.digests.get(key, PersistentMap[PeerId, str]())
    is_other = digests.get(event.peer, event.digest) != event.digest
    if is_other:
        # On a tie the digest attested first stands, so a peer that changes its digest moves to the end.
        digests = digests.without(event.peer)
    if is_other or (event.peer, *key) in state.diverged:  # an offer from another anchor was a change, too
        changes = state.digest_changes.get(key, {})
        changes = {**changes, event.peer: changes.get(event.peer, 0) + 1}
        state = replace(state, digest_changes={**state.digest_changes, key: changes})
    state = replace(state, digests={**state.digests, key: digests.set(event.peer, event.digest)})
    if event.part == Part.STAGE:
        rounds = state.synced.get(event.peer, {})
        newest = max(event.round_number, rounds.get(event.stage, 0))
        state = replace(state, synced=state.synced.set(event.peer, {**rounds, event.stage: newest}))
        if event.round_number >= state.current_round - 2:
            state = replace(state, promised=state.promised.set(event.peer, event.at))
    if state.diverged:
        # A later anchor contains the earlier ones, so it also heals divergences of earlier rounds.
        found = (event.peer, event.stage, event.part)
        healed = {
            each
            for each in state.diverged
            if (each[0], each[1], each[3]) == found and each[2] <= event.round_number
        }
        state = replace(state, diverged=state.diverged - healed)
    return state


def diverge(state: State, event: events.AnchorDiverged) -> State:
    found = (event.peer, event.stage, event.round_number, event.part)
    rounds = state.synced.get(event.peer, {})
    # Every member needs the embedding, so a peer with a wrong one is in sync with no stage.
    still = {stage: n for stage, n in rounds.items() if event.part == Part.STAGE and stage != event.stage}
    state = replace(state, diverged=state.diverged | {found}, synced=state.synced.set(event.peer, still))
    return follow(mark_absent(state, event.peer), event.peer)
