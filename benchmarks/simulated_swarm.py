"""A swarm in simulated time: the coordinator's production rules, and nodes whose work only takes its time.

Production code: every decision of the coordinator (:mod:`coordinator.run.decide`: admission, placement,
shares, windows, groups, commits, losses), the schedule of a gathering, the cost model of an inner step, the
descriptors and their signatures. Replaced: processes, messages and bytes. A node is a script with the times
of the production node loop: it trains for the time that the cost model gives, offers, gathers for the time
that its group's schedule needs over the lines, reports, follows the embedding, attests, and trains again.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import count

from benchmarks.rules import Rules
from benchmarks.simulated_lines import (
    embedding_seconds,
    gather_seconds,
    reduction_seconds,
    result_seconds,
)
from coordinator.api.remembered import closing_time
from coordinator.placement.cost_model import Costs, Survey
from coordinator.reduction.traffic import result_ratio
from coordinator.run.rounds.deadlines import decide_seconds
from coordinator.run.state import commands, events
from coordinator.run.state.events import Event
from coordinator.run.state.state import State
from protocol.errors import ErrorCode, HetnodeError
from protocol.math.turns import due_stages
from protocol.reduction.partition import group_shares
from protocol.spec.fixed import LEAST_SHARE
from protocol.spec.run import RunSpec
from protocol.trust.envelope import sign_descriptor
from protocol.types import (
    Capacity,
    Committed,
    Decision,
    Estimates,
    ExchangeGroup,
    Part,
    PayloadDescriptor,
    PeerId,
    Rejection,
    Replica,
    ReservedAssignment,
    ResultClaim,
    Role,
    StageRange,
    entries_of,
)
from tests.builders import Keyed, anchor_of, keyed

TICK_SECONDS = 10.0
"""Between two looks of the coordinator at silent peers; deadlines have ticks of their own."""
_BREAK_SECONDS = 40.0
"""After so long without an answer a node gives up the link to a neighbour whose machine is off."""
_LATENCY = 0.1
"""Seconds for a call and its answer."""
_STATE_BYTES = 8
"""Of a parameter, for a node that comes back: anchor and momentum in float32."""
_RETRY_SECONDS = 10.0
_CLOSING_MARGIN = 1.0
"""Seconds by which a replica offers before its round closes."""


@dataclass
class Node:
    """One simulated node.

    Attributes:
        is_on: its machine runs.
        starts: how often it was turned on.
        stages: of which it has the anchors; None while it has none.
        ready: when it has applied the newest decided round, by the number of that round.
    """

    keys: Keyed
    peer: PeerId
    role: Role
    capacity: Capacity
    is_on: bool = True
    starts: int = 1
    stages: StageRange | None = None
    ready: dict[int, float] = field(default_factory=dict)


@dataclass
class Phase:
    """The inner phase of a replica in one round."""

    replica: Replica
    epoch: int
    round_number: int
    began: float
    step_seconds: float
    steps: int
    version: int = 0
    is_over: bool = False


class SimulatedSwarm:
    """A run in simulated time; the same calls give the same events.

    Args:
        members: role and capacity of each node.
        payload_bytes: of one payload, by stage.
        parameters: of each stage.

    Attributes:
        events: how many of each kind there were.
        digest: a hash of all events so far.
        decisions: of all stages.
    """

    def __init__(
        self,
        spec: RunSpec,
        members: Sequence[tuple[Role, Capacity]],
        payload_bytes: Sequence[int],
        parameters: Sequence[int],
    ) -> None:
        self.spec = spec
        self.rules = Rules(State(spec, spec.name), on_event=self._note)
        self.events: Counter[str] = Counter()
        self.decisions: list[Decision] = []
        self._digest = hashlib.sha256()
        self._payload_bytes, self._parameters = payload_bytes, parameters
        keyed_members = [(keyed(number), *member) for number, member in enumerate(members)]
        self.nodes = {keys.peer: Node(keys, keys.peer, *member) for keys, *member in keyed_members}
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._phases: dict[int, Phase] = {}
        self._news: list[Event] = []
        self._once = cache(lambda step: step)
        self._closing_time = closing_time()

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    @property
    def state(self) -> State:
        return self.rules.state

    @property
    def now(self) -> float:
        return self.rules.now

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Do that at `time`."""
        heapq.heappush(self._queue, (max(time, self.now), next(self._numbers), action))

    def run(self, rounds: int) -> Iterator[int]:
        """Let the run begin, and yield each round that is decided, up to `rounds`."""
        self._send(commands.Start())
        for node in self.nodes.values():
            self._join(node)
        self._tick()
        decided = 0
        while decided < rounds:
            time, _, action = heapq.heappop(self._queue)
            self.rules.now = max(self.now, time)
            action()
            while decided < min(rounds, self.state.rounds_decided):
                decided += 1
                yield decided

    def stop(self, node: Node) -> None:
        """Turn the machine off. The coordinator notices when it is silent."""
        node.is_on, node.stages = False, None
        for phase in self._phases.values():
            if not phase.is_over and phase.replica.position_of(node.peer) >= 0:
                self.at(self.now + _BREAK_SECONDS, partial(self._retreat, phase))

    def start(self, node: Node) -> None:
        """Turn the machine on: the node joins, catches up, and takes part when a plan assigns it."""
        node.is_on = True
        node.starts += 1
        node.ready.clear()
        self._join(node)

    def _send(self, command: commands.Command) -> HetnodeError | None:
        """Send to the coordinator, and react to what has happened. Returns a refusal."""
        refusal = None
        try:
            self.rules.send(command)
        except HetnodeError as error:
            refusal = error
        news, self._news = self._news, []
        for event in news:
            self._react(event)
        return refusal

    def _note(self, event: Event) -> None:
        self.events[type(event).__name__] += 1
        self._digest.update(repr(event).encode())
        self._news.append(event)

    def _join(self, node: Node) -> None:
        if not node.is_on:
            return
        join = replace(node.keys.join(self.spec, node.role), capacity=node.capacity)
        refusal = self._send(join)
        if refusal is not None and refusal.code is not ErrorCode.ALREADY_ACTIVE:
            raise refusal
        if refusal is not None:
            self.at(self.now + _RETRY_SECONDS, partial(self._join, node))
        elif self.state.plans:
            self._catch_up(node, node.starts)

    def _tick(self) -> None:
        self._tell_time()
        self.at(self.now + TICK_SECONDS, self._tick)

    def _tell_time(self) -> None:
        """Let the coordinator look at its deadlines; it has heard all machines that run."""
        self._send(commands.Tick({node.peer: self.now for node in self.nodes.values() if node.is_on}))
        self._shorten_phases()

    def _react(self, event: Event) -> None:
        match event:
            case events.PlanAdopted(plan=plan):
                if plan.from_round == self.state.current_round:
                    self._begin_all(plan.from_round)
            case events.GroupClosed(stage=stage, round_number=round_number):
                exchange = self._reduce if self.spec.outer.exchange == "reduced" else self._gather
                exchange(stage, round_number)
            case events.RoundDecided(decision=decision):
                self.decisions.append(decision)
                self._apply(decision)

    def _begin_all(self, round_number: int) -> None:
        """Begin a round in each replica when all its members have applied the round before."""
        for replica in self.state.plan_for(round_number).replicas:
            ready = [self.nodes[each.peer].ready.get(round_number - 1, self.now) for each in replica.members]
            self.at(max(ready), partial(self._begin, replica, round_number))

    def _begin(self, replica: Replica, round_number: int) -> None:
        state = self.state
        plan = state.plan_for(round_number)
        known = self._phases.get(replica.index)
        is_known = known is not None and (known.epoch, known.round_number) == (plan.epoch, round_number)
        if replica not in plan.replicas or state.current_round != round_number or is_known:
            return
        if not all(self.nodes[each.peer].is_on for each in replica.members):
            return
        survey = Survey({each.peer: self.nodes[each.peer].capacity for each in replica.members})
        ks, microbatches = [link.k for link in replica.links], self.spec.microbatches_of(replica)
        # Replicas of equal peers are replayed once.
        seconds = self._once(Costs(self.spec, survey).step(replica.members, ks, microbatches)).seconds
        steps = self.spec.inner.steps
        phase = Phase(replica, plan.epoch, round_number, self.now, seconds, steps)
        self._phases[replica.index] = phase
        self.at(self.now + steps * seconds, partial(self._finish, phase, 0))

    def _shorten_phases(self) -> None:
        """End the phases early that would end after their round closes, as nodes do that are told so."""
        closing = self._closing_time.of(self.state)
        if closing is None:
            return
        if closing > self.now:
            self.at(closing + 0.01, self._look_at_deadline)
        for phase in self._phases.values():
            end = phase.began + phase.steps * phase.step_seconds
            if phase.is_over or phase.round_number != self.state.current_round:
                continue
            if end > closing - _CLOSING_MARGIN:
                left = closing - _CLOSING_MARGIN - phase.began
                phase.steps = max(0, int(left / phase.step_seconds))
                phase.version += 1
                end = max(self.now, phase.began + phase.steps * phase.step_seconds)
                self.at(end, partial(self._finish, phase, phase.version))

    def _look_at_deadline(self) -> None:
        closing = self._closing_time.of(self.state)
        if closing is not None and closing <= self.now:
            self._tell_time()

    def _finish(self, phase: Phase, version: int) -> None:
        """Offer the payloads of a replica, or withhold them where it has done too little."""
        state, spec = self.state, self.spec
        is_current = self._phases.get(phase.replica.index) is phase and phase.version == version
        if phase.is_over or not is_current or state.plan_for(phase.round_number).epoch != phase.epoch:
            return
        if not all(self.nodes[each.peer].is_on for each in phase.replica.members):
            return
        phase.is_over = True
        share = phase.steps / spec.inner.steps
        self._measure(phase)
        for member in phase.replica.members:
            for stage in due_stages(spec, phase.round_number, member.stages):
                if share < LEAST_SHARE:
                    withheld = commands.Await(member.peer, stage, phase.round_number, phase.epoch)
                    self._send(withheld)
                else:
                    payload = self._payload(member.peer, stage, phase, share)
                    self._send(commands.Offer(member.peer, payload))
        self._shorten_phases()

    def _measure(self, phase: Phase) -> None:
        """Tell the measured time of a microbatch, as the first member of a replica does."""
        first = phase.replica.members[0].peer
        seconds = phase.step_seconds / self.spec.microbatches_of(phase.replica)
        estimates = Estimates(self.nodes[first].capacity, seconds)
        self._send(commands.Heartbeat(first, phase.round_number, phase.steps, estimates))

    def _payload(self, peer: PeerId, stage: int, phase: Phase, share: float) -> PayloadDescriptor:
        node, number = self.nodes[peer], phase.round_number
        unsigned = PayloadDescriptor(
            run=self.state.run,
            stage=stage,
            round_number=number,
            owner=peer,
            anchor_digest=anchor_of(stage, number - 1),
            codec="sparse",
            weight=phase.replica.weight * share,
            nbytes=self._payload_bytes[stage],
            sha256=hashlib.sha256(f"{peer} {stage} {number}".encode()).hexdigest(),
            epoch=phase.epoch,
        )
        return sign_descriptor(unsigned, node.keys.sign)

    def _gather(self, stage: int, round_number: int) -> None:
        """Let each member of a group report when it has gathered the payloads."""
        group = self.state.rounds[stage, round_number].group
        assert group is not None
        seconds = gather_seconds(group, self._stages_in(group), self._capacity)
        longest = group.seconds or self.spec.timing.fetch
        payloads = group.descriptors
        for place, (owner, each) in enumerate(seconds.items()):
            # Those that come in time, in a circle from its own one on; machines that are off send nothing.
            count = 1 + int((len(payloads) - 1) * min(1.0, longest / each)) if each else len(payloads)
            arrived = (*payloads[place:], *payloads[:place])[:count]
            held = tuple(payload for payload in arrived if self.nodes[payload.owner].is_on)
            report = commands.Report(owner, stage, round_number, held)
            self.at(self.now + _LATENCY + min(each, longest), partial(self._report, report))
        self.at(self.now + decide_seconds(self.spec, group) + _LATENCY, self._tell_time)

    def _reduce(self, stage: int, round_number: int) -> None:
        """Let each member of a group report when it has the result of the reducers."""
        group = self.state.rounds[stage, round_number].group
        assert group is not None
        ratio = result_ratio(self.spec.outer)
        seconds = reduction_seconds(group, self._stages_in(group), self._capacity, ratio)
        longest = group.seconds or self.spec.timing.fetch
        off = [each.owner for each in group.descriptors if not self.nodes[each.owner].is_on]
        open_, uplinks = [each.is_open for each in group.lines], [each.uplink for each in group.lines]
        shares = group_shares(open_, uplinks, ratio)
        dead = [each for each, share in zip(group.descriptors, shares, strict=True) if share]
        dead = [each for each in dead if each.owner in off]
        digest = hashlib.sha256(f"{stage} {round_number} {off}".encode()).hexdigest()
        claim = ResultClaim(digest, round(ratio * group.descriptors[0].nbytes), tuple(off))
        for own in group.descriptors:
            # Reducers wait for half of the time for those that are off.
            each = max(seconds[own.owner], longest / 2 if off else 0.0)
            is_there = not dead and each <= longest
            rejected = tuple(Rejection(one, "it has not sent its sums") for one in dead)
            held, found = (own,), claim if is_there else None
            report = commands.Report(own.owner, stage, round_number, held, rejected, found)
            self.at(self.now + _LATENCY + min(each, longest), partial(self._report, report))
        self.at(self.now + decide_seconds(self.spec, group) + _LATENCY, self._tell_time)

    def _stages_in(self, group: ExchangeGroup) -> dict[PeerId, int]:
        """How many stages each member of a group exchanges in its round."""
        found = {
            each.owner: self.state.assignment(each.owner, each.round_number) for each in group.descriptors
        }
        number = group.descriptors[0].round_number
        return {
            peer: len(due_stages(self.spec, number, each.member.stages))
            for peer, each in found.items()
            if each is not None
        }

    def _report(self, report: commands.Report) -> None:
        is_decided = (report.stage, report.round_number) in self.state.decisions
        if self.nodes[report.peer].is_on and not is_decided:
            self._send(report)

    def _apply(self, decision: Decision) -> None:
        """Let all nodes apply a round that is decided at all stages, and then begin the next one."""
        number, state = decision.round_number, self.state
        if state.current_round <= number:
            return
        held = [each for each in state.reservations.values() if self._has_anchors(each)]
        followers = [each.peer for each in held if each.stages.first]
        embedding = self._embedding_seconds(state.decisions[0, number], followers)
        for each in held:
            node, seconds = self.nodes[each.peer], embedding.get(each.peer, 0.0)
            if state.assignment(each.peer, number) is None:  # it has not gathered the others' payloads yet
                decisions = [state.decisions[stage, number] for stage in each.stages]
                nbytes = sum(map(self._nbytes_of, decisions))
                seconds += nbytes / node.capacity.downlink
            node.ready = {number: self.now + _LATENCY + seconds}
            self.at(node.ready[number], partial(self._attest, node, node.starts, number))
        if number < self.spec.rounds:
            self._begin_all(number + 1)

    def _embedding_seconds(self, decision: Decision, followers: Sequence[PeerId]) -> dict[PeerId, float]:
        """Seconds until each member without stage 0 has what changes the embedding."""
        result = decision.result if isinstance(decision, Committed) else None
        if result is None:
            return embedding_seconds(entries_of(decision), followers, self._capacity)
        hosts = [entry.descriptor.owner for entry in entries_of(decision)]
        return result_seconds(result.nbytes, hosts, followers, self._capacity)

    def _nbytes_of(self, decision: Decision) -> int:
        """What a member fetches to apply a decision in whose exchange it was not."""
        if isinstance(decision, Committed) and decision.result is not None:
            return decision.result.nbytes
        return len(entries_of(decision)) * self._payload_bytes[decision.stage]

    def _has_anchors(self, reservation: ReservedAssignment) -> bool:
        """Whether a node has the anchors of its reserved stages. If not, it begins to load them."""
        node = self.nodes[reservation.peer]
        if node.is_on and node.stages is None and self.state.rounds_decided == 1:
            node.stages = reservation.stages  # every node has made the first anchors itself
        if node.is_on and node.stages not in (None, reservation.stages):
            node.stages = None
            self._catch_up(node, node.starts)
        return node.is_on and node.stages is not None

    def _catch_up(self, node: Node, start: int) -> None:
        """Load the anchors of the stages that are reserved for a node, as soon as any are."""
        if not node.is_on or node.starts != start:
            return
        reservation = self.state.reservations.get(node.peer)
        if reservation is None:
            self.at(self.now + _RETRY_SECONDS, partial(self._catch_up, node, start))
            return
        parameters = sum(self._parameters[stage] for stage in reservation.stages)
        seconds = _STATE_BYTES * parameters / node.capacity.downlink
        self.at(self.now + _LATENCY + seconds, partial(self._has_caught_up, node, start, reservation.stages))

    def _has_caught_up(self, node: Node, start: int, stages: StageRange) -> None:
        if node.is_on and node.starts == start:
            node.stages = stages
            self._attest(node, start, self.state.rounds_decided)

    def _attest(self, node: Node, start: int, round_number: int) -> None:
        """Tell the digests of the anchors that a node has after a round."""
        reservation = self.state.reservations.get(node.peer)
        if not node.is_on or node.starts != start or reservation is None or node.stages != reservation.stages:
            return
        anchors = [(stage, Part.STAGE) for stage in reservation.stages]
        if reservation.stages.first:
            anchors.append((0, Part.EMBEDDING))
        for stage, part in anchors:
            digest = anchor_of(stage, round_number)
            self._send(commands.Attest(node.peer, stage, round_number, part, digest))

    def _retreat(self, phase: Phase) -> None:
        """The members of a replica whose neighbour is gone give up its round."""
        state = self.state
        if phase.is_over or not state.plans or state.plans[-1].epoch != phase.epoch:
            return
        phase.is_over = True
        for member in phase.replica.members:
            if self.nodes[member.peer].is_on:
                self._send(commands.Retreat(member.peer, phase.epoch, "its neighbour does not answer"))

    def _capacity(self, peer: PeerId) -> Capacity:
        return self.nodes[peer].capacity
