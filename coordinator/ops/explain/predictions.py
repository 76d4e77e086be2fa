"""What the cost model predicts for the present plan, and for a plan with one thing changed.

Every sentence says that it is a prediction. Where nothing is measured there is none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from coordinator.ops.explain.facts import Facts, duration, gigaflops, megabits, say, with_short_ids
from coordinator.ops.forecast.forecast import Forecast, ReplicaForecast, forecast
from coordinator.placement.cost_model import Survey, survey_of
from coordinator.placement.predict import predict
from coordinator.placement.rules import fits, is_synced, links_between, may_be_neighbours, member_of
from coordinator.run.state.state import Peer, State
from coordinator.run.state.text import counted, short
from protocol.spec.link import width_order
from protocol.status import Sentence
from protocol.types import LinkEstimate, Member, PeerId, Replica

MOST_OPERATIONS = 100_000
"""Operations of members in one inner step of all replicas, up to which changes are predicted as well."""
MOST_SPARES = 8
"""Spares that are tried in the place of a slow member."""
_WORTH = 0.01
"""A change is told if it makes a step or a round shorter by this share."""


@dataclass(frozen=True)
class Outlook:
    """The predicted rounds of the replicas that train, and where their time goes.

    Attributes:
        slowest: the replica whose inner step takes longest.
    """

    survey: Survey
    replicas: tuple[Replica, ...]
    payloads: tuple[float, ...]
    base: Forecast

    @property
    def slowest(self) -> ReplicaForecast:
        return max(self.base.replicas, key=lambda each: each.step.seconds)


def outlook_of(facts: Facts) -> Outlook | None:
    """None without a plan, without a complete replica, or where no speed is known."""
    state = facts.state
    if not state.plans or not 1 <= state.current_round <= state.spec.rounds:
        return None
    replicas, survey = tuple(state.complete_replicas(state.current_round)), survey_of(state)
    if not replicas or survey.is_blank:
        return None
    payloads = _payload_bytes(state)
    return Outlook(survey, replicas, payloads, _forecast(state, survey, replicas, payloads))


def prediction_sentences(facts: Facts, outlook: Outlook) -> Iterator[Sentence]:
    """The bottleneck of a step and of a round, then what would make them shorter; best first."""
    base = outlook.base
    yield say(
        f"Prediction of the cost model: a round takes {duration(base.round_seconds)}, of which "
        f"{duration(base.inner_seconds)} are the inner phase and "
        f"{duration(base.outer_seconds - base.hidden_seconds)} the exchange; it waits most for "
        f"{with_short_ids(base.bottleneck)}",
    )
    if _operations(facts.state, outlook.replicas) > MOST_OPERATIONS:
        yield say(
            f"With {counted(len(outlook.replicas), 'replica')}, changes are not predicted here: "
            "'hetnode plan' does that on any machine"
        )
        return
    for change in sorted(_changes(facts, outlook), key=lambda each: -each.gain):
        yield Sentence(change.text, change.events)


@dataclass(frozen=True)
class Change(Sentence):
    """A sentence about a change, with the seconds of a round that it saves."""

    gain: float = 0.0


def _changes(facts: Facts, outlook: Outlook) -> Iterator[Change]:
    state, slowest = facts.state, outlook.slowest
    step, members = slowest.step, slowest.replica.members
    resource = step.bottleneck
    if resource is None:
        return
    one, other = members[resource.position], members[resource.other]
    if resource.kind == "computing":
        faster = _with_flops(outlook.survey, one.peer, 2.0)
        have = gigaflops(outlook.survey.flops(one.peer))
        yield from _change(facts, outlook, f"If {short(one.peer)} ({have}) computed twice as fast", faster)
    elif resource.kind == "sending":
        have = megabits(outlook.survey.bandwidth(one.peer, other.peer))
        faster = _with_line(outlook.survey, one.peer, other.peer, 2.0)
        what = f"If the line from {short(one.peer)} to {short(other.peer)} ({have}) carried twice as much"
        yield from _change(facts, outlook, what, faster)
    else:
        faster = _with_delay(outlook.survey, one.peer, other.peer, 0.5)
        what = f"If messages between {short(one.peer)} and {short(other.peer)} took half the time"
        yield from _change(facts, outlook, what, faster)
    yield from _with_spare(facts, outlook, slowest.replica, resource.position)
    if resource.kind == "sending":
        link = min(resource.position, resource.other)
        yield from _with_narrower_k(facts, outlook, slowest.replica, link)
    yield from _with_one_more(state, outlook)


def _change(
    facts: Facts,
    outlook: Outlook,
    what: str,
    survey: Survey,
    replicas: Sequence[Replica] = (),
    but: str = "",
) -> Iterator[Change]:
    after = _forecast(facts.state, survey, replicas or outlook.replicas, outlook.payloads)
    yield from _compared(outlook, what, after, but)


def _compared(outlook: Outlook, what: str, after: Forecast, but: str = "") -> Iterator[Change]:
    base, index = outlook.base, outlook.slowest.replica.index
    steps = [
        next(each.step.seconds for each in found.replicas if each.replica.index == index)
        for found in (base, after)
    ]
    gain = base.round_seconds - after.round_seconds
    if steps[0] - steps[1] < _WORTH * steps[0] and gain < _WORTH * base.round_seconds:
        return
    text = (
        f"{what}, the inner step of {outlook.slowest.replica.name} would take {duration(steps[1])} instead "
        f"of {duration(steps[0])}, and a round {duration(after.round_seconds)} instead of "
        f"{duration(base.round_seconds)} (prediction){but}"
    )
    if gain < _WORTH * base.round_seconds:
        text += "; the round would wait for another replica or for the exchange then"
    sentence = say(text)
    yield Change(sentence.text, sentence.events, gain)


def _with_spare(facts: Facts, outlook: Outlook, replica: Replica, position: int) -> Iterator[Change]:
    """The best spare in the place of one member."""
    state, member = facts.state, replica.members[position]
    found: list[tuple[float, str, Forecast]] = []
    for peer in _spares(state, replica, position)[:MOST_SPARES]:
        members = list(replica.members)
        members[position] = member_of(peer, member.stages)
        ks = [link.k for link in replica.links]
        changed = replace(replica, members=tuple(members), links=links_between(members, ks))
        replicas = [changed if each.index == replica.index else each for each in outlook.replicas]
        after = _forecast(state, outlook.survey, replicas, outlook.payloads)
        reserved = state.reservations.get(peer.peer)
        is_ready = (
            reserved is not None
            and reserved.stages == member.stages
            and is_synced(state, reserved, state.current_round)
        )
        but = "" if is_ready else "; it would have to load these stages first"
        what = f"With the spare {short(peer.peer)} in the place of {short(member.peer)}{but}"
        found.append((after.round_seconds, what, after))
    if found:
        _, what, after = min(found, key=lambda each: each[0])
        yield from _compared(outlook, what, after)


def _spares(state: State, replica: Replica, position: int) -> list[Peer]:
    """The stage peers without a part in the plan that could be at `position` of `replica`."""
    assigned = state.assignments.get(state.plan_for(state.current_round).epoch, {})
    member = replica.members[position]
    neighbours = [
        state.peers[replica.members[at].peer]
        for at in (position - 1, position + 1)
        if 0 <= at < len(replica.members)
    ]
    left = len(replica.members) - position
    return [
        peer
        for peer in state.staying
        if peer.peer not in assigned
        and peer.policy.is_alone(state.spec) == (len(replica.members) == 1)
        and fits(state, peer.peer, member.stages, left)
        and all(may_be_neighbours(state, peer, each) for each in neighbours)
    ]


def _with_narrower_k(facts: Facts, outlook: Outlook, replica: Replica, position: int) -> Iterator[Change]:
    """The next narrower k of one link: the run's next possible one, or half where k is fixed."""
    spec, present = facts.state.spec, replica.links[position].k
    possible = spec.link.possible_ks if spec.link.adapts else ((present or spec.model.width) // 2,)
    narrower = [k for k in possible if 0 < k < width_order(present)]
    if not narrower:
        return
    ks = [narrower[-1] if at == position else link.k for at, link in enumerate(replica.links)]
    changed = replace(replica, links=links_between(replica.members, ks))
    replicas = [changed if each.index == replica.index else each for each in outlook.replicas]
    ends = " -> ".join(short(each.peer) for each in replica.members[position : position + 2])
    but = (
        "; the coordinator narrows k by itself where that pays"
        if spec.link.adapts
        else "; k is fixed in the specification of this run"
    )
    was = present or "uncompressed activations"
    what = f"With k = {narrower[-1]} instead of {was} on the link {ends}"
    yield from _change(facts, outlook, what, outlook.survey, replicas, but)


def _with_one_more(state: State, outlook: Outlook) -> Iterator[Change]:
    """One more replica like the fastest one: more tokens in about the same time."""
    fastest = min(outlook.base.replicas, key=lambda each: each.step.seconds).replica
    twins = {each.peer: PeerId(f"another {each.peer}") for each in fastest.members}
    members = tuple(replace(each, peer=twins[each.peer]) for each in fastest.members)
    index = 1 + max(each.index for each in outlook.replicas)
    twin = replace(fastest, index=index, members=members)
    survey = _with_twins(outlook.survey, fastest.members, twins)
    after = _forecast(state, survey, (*outlook.replicas, twin), outlook.payloads)
    before = outlook.base
    if after.tokens_per_second <= before.tokens_per_second * (1 + _WORTH):
        return
    instead = f"instead of {before.tokens_per_second:,.0f}"
    sentence = say(
        f"With one more replica like {fastest.name}, the run would train "
        f"{after.tokens_per_second:,.0f} tokens/s {instead}, and a round would take "
        f"{duration(after.round_seconds)} (prediction)"
    )
    yield Change(sentence.text, sentence.events, -1.0)  # it shortens no round: after those that do


def _forecast(
    state: State, survey: Survey, replicas: Sequence[Replica], payloads: Sequence[float]
) -> Forecast:
    return forecast(state.spec, survey, replicas, [round(each) for each in payloads])


def _payload_bytes(state: State) -> tuple[float, ...]:
    """The mean size of the payloads of the kept rounds, by stage; 0 before the first one."""
    found: list[list[int]] = [[] for _ in range(state.stages)]
    for (stage, _), round_state in state.rounds.items():
        found[stage] += [each.nbytes for each in round_state.offers.values()]
    return tuple(sum(sizes) / len(sizes) if sizes else 0.0 for sizes in found)


def _operations(state: State, replicas: Sequence[Replica]) -> int:
    return sum(2 * len(each.members) * state.spec.microbatches_of(each) for each in replicas)


def _with_flops(survey: Survey, peer: PeerId, factor: float) -> Survey:
    capacity = replace(survey.capacity(peer), flops=survey.flops(peer) * factor)
    return replace(survey, capacities={**survey.capacities, peer: capacity})


def _with_line(survey: Survey, sender: PeerId, receiver: PeerId, factor: float) -> Survey:
    """`survey` in which whatever bounds the messages from `sender` to `receiver` carries more."""
    one, other = survey.capacity(sender), survey.capacity(receiver)
    capacities = {
        **survey.capacities,
        sender: replace(one, uplink=one.uplink * factor),
        receiver: replace(other, downlink=other.downlink * factor),
    }
    links: dict[tuple[PeerId, PeerId], LinkEstimate] = dict(survey.links)
    if (sender, receiver) in links:
        link = links[sender, receiver]
        links[sender, receiver] = replace(link, bandwidth=link.bandwidth * factor)
    if (receiver, sender) in links:
        link = links[receiver, sender]
        links[receiver, sender] = replace(link, incoming=link.incoming * factor)
    shares = {
        peer: share * factor if peer in (sender, receiver) else share
        for peer, share in survey.relay_shares.items()
    }
    return replace(survey, capacities=capacities, links=links, relay_shares=shares)


def _with_delay(survey: Survey, one: PeerId, other: PeerId, factor: float) -> Survey:
    capacities, links = dict(survey.capacities), dict(survey.links)
    for peer in (one, other):
        capacity = survey.capacity(peer)
        capacities[peer] = replace(capacity, round_trip=capacity.round_trip * factor)
    for ends in ((one, other), (other, one)):
        if ends in links:
            links[ends] = replace(links[ends], round_trip=links[ends].round_trip * factor)
    return replace(survey, capacities=capacities, links=links)


def _with_twins(survey: Survey, members: Sequence[Member], twins: Mapping[PeerId, PeerId]) -> Survey:
    """`survey` with a second set of `members`, whose machines and lines are equal."""
    capacities = {twins[each.peer]: survey.capacity(each.peer) for each in members}
    links = {}
    for one, other in pairwise(members):
        for ends in ((one.peer, other.peer), (other.peer, one.peer)):
            if ends in survey.links:
                links[twins[ends[0]], twins[ends[1]]] = replace(survey.links[ends], peer=twins[ends[1]])
    return replace(survey, capacities={**survey.capacities, **capacities}, links={**survey.links, **links})


def step_sentence(facts: Facts, replica: Replica) -> str:
    """What an inner step of a pipeline waits for most by the cost model; "" where nothing is known."""
    survey = survey_of(facts.state)
    if len(replica.members) < 2 or survey.is_blank:
        return ""
    found = predict(facts.state.spec, survey, [replica]).replicas[0]
    if found.bottleneck is None:
        return ""
    seconds = duration(found.step.seconds)
    return f"its inner step takes {seconds} by the cost model and waits most for {found.bottleneck}"
