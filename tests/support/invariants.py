"""What holds in every run, whatever its peers do: checked event by event, on a log or in a test.

The checks read events and states alone, so they serve the random runs of the tests, the virtual swarm and the
replay of a recorded log.
"""

from __future__ import annotations

from coordinator.placement.cost_model import memory_needed
from coordinator.run.rounds.attestation import settled_digest
from coordinator.run.state.apply_rounds import owners_of
from coordinator.run.state.events import (
    AssignmentReserved,
    Event,
    GroupClosed,
    HoldingsReported,
    PayloadOffered,
    PlanAdopted,
    RoundDecided,
    RunRolledBack,
)
from coordinator.run.state.state import KEPT_DECISIONS, KEPT_ROUNDS, State
from coordinator.status.messages import run_message
from protocol.group.batch import work_of
from protocol.math.sampling import sample_range
from protocol.spec.fixed import MEMORY_RESERVE
from protocol.spec.run import RunSpec
from protocol.status import RunPhase
from protocol.types import (
    Committed,
    CommittedResult,
    Decision,
    Finding,
    Part,
    PayloadDescriptor,
    PeerId,
    Plan,
    ReservedAssignment,
    RolledBack,
    entries_of,
)
from tests.support.plan_rules import violations


class InvariantBroken(Exception):
    """An invariant does not hold. The text is a sentence that names it with the values."""


class Invariants:
    """Checks one run. Call :meth:`check_event` for each event, and :meth:`check_state` after each command.

    Both raise InvariantBroken. In between the events of one command, the state may be incomplete.
    """

    def __init__(self, spec: RunSpec) -> None:
        self._spec, self._stages = spec, spec.swarm.stages
        self._had: set[tuple[PeerId, int, int]] = set()
        self._decisions: dict[tuple[int, int], Decision] = {}
        self._offered: dict[tuple[int, int], set[PayloadDescriptor]] = {}
        self._held: dict[tuple[int, int], dict[PeerId, frozenset[PeerId]]] = {}
        self._unfounded: list[tuple[Decision, int]] = []
        self._plans: list[Plan] = []
        self._tiled, self._next_sample = 0, 0
        self._unknown = 0  # decisions that a folder lacks which was restored from an older copy

    def check_event(self, before: State, event: Event, after: State) -> None:
        """`event` has changed `before` to `after`."""
        _require(after.current_round >= before.current_round, "the current round went back")
        of_round = isinstance(event, PayloadOffered | GroupClosed | RoundDecided)
        is_rollback = isinstance(event, RoundDecided) and event.decision.round_number in before.restored
        goes_on = of_round and not is_rollback
        _require(not (before.is_held and goes_on), "a round goes on although the run is paused before it")
        match event:
            case PayloadOffered(descriptor=descriptor):
                key = descriptor.stage, descriptor.round_number
                self._offered.setdefault(key, set()).add(descriptor)
            case HoldingsReported():
                held = self._held.setdefault((event.stage, event.round_number), {})
                owners = owners_of(before.round_of(event.stage, event.round_number), event)
                held[event.peer] = held.get(event.peer, frozenset()) | owners
            case RunRolledBack() if event.restore_round >= before.current_round:
                known = sum(number == before.current_round for _, number in before.decisions)
                self._unknown += self._stages * (event.round_number - before.current_round) - known
            case RoundDecided():
                self._check_decision(before, event.decision, after)
            case PlanAdopted():
                if before.plans:
                    self._check_plan(before, event.plan)
                self._plans.append(event.plan)
                if event.plan.from_round <= self._tiled:
                    self._tiled, self._next_sample = 0, 0
            case AssignmentReserved():
                self._check_memory(after, event.reservation)
            case _:
                pass
        self._had |= {(each.peer, each.replica, each.position) for each in after.reservations.values()}

    def check_state(self, state: State) -> None:
        """`state` is that after all events of one command."""
        banned = [peer for peer in state.banned if peer in state.peers and state.peers[peer].is_live]
        _require(not banned, f"the banned peers {banned} take part")
        _require(state.decided == len(self._decisions), "a decision was lost")
        for decision, need in self._unfounded:
            self._check_founded(state, decision, need)
            self._check_rollback(state, decision.round_number)
        self._unfounded.clear()
        self._check_slots(state)
        self._check_plans_kept(state)
        self._check_tiling(state)
        _require(bool(run_message(state)), "there is no sentence about what the run does")
        if state.phase is RunPhase.FINISHED:
            all_decided = state.decided == self._stages * self._spec.rounds - self._unknown
            _require(all_decided, "the run is finished, and not all of its rounds are decided")

    def _check_rollback(self, state: State, round_number: int) -> None:
        """All stages go back to the same round, or none; their anchors are expected to be those after it."""
        restored = state.restored.get(round_number)
        decisions = [state.decisions.get((stage, round_number)) for stage in range(self._stages)]
        found = {
            each.restore_round if isinstance(each, RolledBack) else None
            for each in decisions
            if each is not None
        }
        _require(
            found == {restored}, f"the decisions of round {round_number} restore {found}, not {restored}"
        )
        if restored is None:
            return
        _require(None not in decisions, f"round {round_number} is a rollback of some stages alone")
        _require(restored < round_number, f"round {round_number} restores the later round {restored}")
        for stage in range(self._stages):
            now = settled_digest(state, stage, round_number, Part.STAGE)
            then = settled_digest(state, stage, restored, Part.STAGE)
            where = f"stage {stage} after round {round_number}"
            _require(
                now is not None and then in (now, None), f"the anchor of {where} is not the restored one"
            )

    def _check_decision(self, before: State, decision: Decision, after: State) -> None:
        key = decision.stage, decision.round_number
        where = _where(decision)
        _require(not before.is_decided(*key) and key not in self._decisions, f"{where} was decided twice")
        _require(after.decisions.get(key) == decision, f"{where}: another decision is kept")
        epoch = after.plan_for(decision.round_number + 1).epoch
        _require(decision.next_epoch == epoch, f"{where} names plan {decision.next_epoch}, not {epoch}")
        # Afterwards the state may have forgotten who was absent.
        self._check_more_than_half(before, decision)
        self._decisions[key] = decision
        complete = len(before.complete_replicas(decision.round_number))
        self._unfounded.append((decision, max(1, min(2, complete))))
        oldest = decision.round_number - KEPT_ROUNDS
        self._offered = {each: found for each, found in self._offered.items() if each[1] >= oldest}
        self._held = {each: found for each, found in self._held.items() if each[1] >= oldest}

    def _check_more_than_half(self, state: State, decision: Decision) -> None:
        """By weight, no minority of the replicas that might have contributed decides a round."""
        number = decision.round_number
        owners = {entry.descriptor.owner for entry in entries_of(decision)}
        withheld = state.round_of(decision.stage, number).withheld
        hosts = {each.host_of(decision.stage).peer: each.weight for each in state.complete_replicas(number)}
        missing = sum(weight for peer, weight in hosts.items() if peer not in owners | withheld)
        assigned = [state.assignment(owner, number) for owner in owners]
        present = sum(each.replica.weight for each in assigned if each is not None)
        # Half is enough if the others have offered as well, and their payloads cannot count.
        group = state.round_of(decision.stage, number).group
        lacking = {d.owner for d in group.descriptors if d.owner in hosts} - owners if group else set()
        holds = not owners or present > missing or (present == missing and bool(lacking))
        _require(holds, f"{_where(decision)}: weight {present:g} decides against {missing:g}")

    def _check_result(self, state: State, decision: Decision, result: CommittedResult) -> None:
        """The holders have reported the result, and more than half of the group's weight has."""
        where, round_state = _where(decision), state.round_of(decision.stage, decision.round_number)
        group = round_state.group.descriptors if round_state.group else ()
        reporters = {peer for peer, each in round_state.results.items() if each.sha256 == result.sha256}
        _require({*result.holders} <= reporters, f"{where}: a holder has not reported the result")
        holding = sum(each.weight for each in group if each.owner in reporters)
        _require(2 * holding > sum(each.weight for each in group), f"{where}: a minority has decided")

    def _check_founded(self, state: State, decision: Decision, need: int) -> None:
        """Every payload that counts was offered, is on one anchor, and has `need` holders."""
        where, key = _where(decision), (decision.stage, decision.round_number)
        entries, is_committed = entries_of(decision), isinstance(decision, Committed)
        _require(is_committed == bool(entries), f"{where}: committed without payloads")
        _require(bool(decision.reason), f"{where} has no reason")
        owners = [entry.descriptor.owner for entry in entries]
        _require(owners == sorted(owners), f"{where}: its payloads are not in the order of their owners")
        anchors = {entry.descriptor.anchor_digest for entry in entries}
        _require(len(anchors) <= 1, f"{where}: its payloads start from {len(anchors)} anchors")
        if isinstance(decision, Committed) and decision.result is not None:
            self._check_result(state, decision, decision.result)
            return
        contest = state.round_of(*key).contest
        for entry in entries:
            owner, holders = entry.descriptor.owner, set(entry.holders)
            whose = f"{where}: the payload of {owner}"
            _require(entry.descriptor in self._offered.get(key, ()), f"{whose} was not offered")
            assignment = state.assignment(owner, decision.round_number)
            hosts = assignment is not None and decision.stage in assignment.member.stages
            _require(hosts, f"{whose} comes from a peer that does not host the stage")
            # Payloads that were no part of a contest had enough holders when it began.
            had_enough = contest is not None and owner not in {*contest.owners, *contest.left_out}
            is_arbitrated = state.arbiter in holders
            enough = len(holders) >= need or had_enough or is_arbitrated
            _require(enough, f"{whose} has {len(holders)} holders, and {need} must hold it")
            reports = self._held.get(key, {})
            for holder in holders - {state.arbiter}:
                _require(owner in reports.get(holder, ()), f"{whose}: {holder} has not reported it")
            if is_arbitrated:
                verdict = contest.verdicts.get(owner) if contest is not None else None
                found = verdict is not None and verdict.finding is Finding.HELD
                _require(found, f"{whose}: the arbiter does not hold it")

    def _check_memory(self, state: State, reserved: ReservedAssignment) -> None:
        """A peer returns to its former slot also if its memory is now too small."""
        memory = state.peers[reserved.peer].capacity.memory_bytes * (1 - MEMORY_RESERVE)
        members_left = len(state.layout(reserved.replica)) - reserved.position
        needed = memory_needed(self._spec, reserved.stages, members_left, "cpu")
        had = (reserved.peer, reserved.replica, reserved.position) in self._had
        fits = had or not memory or needed <= memory or len(reserved.stages) == self._stages
        _require(fits, f"{reserved.peer} gets stages {reserved.stages}, which need {needed} bytes")

    def _check_plan(self, before: State, plan: Plan) -> None:
        for broken in violations(before, plan):
            raise InvariantBroken(f"plan {plan.epoch}: {broken}")
        for replica in plan.replicas:
            work, what = work_of(self._spec, replica), f"plan {plan.epoch}: {replica.name}"
            _require(replica.weight == work, f"{what} weighs {replica.weight}, not {work}")

    def _check_plans_kept(self, state: State) -> None:
        kept, oldest = len(state.plans), state.current_round - KEPT_DECISIONS
        _require(state.epoch == len(self._plans), "a plan was lost")
        _require(state.plans == tuple(self._plans[-kept:] if kept else ()), "the plans are not those adopted")
        is_whole = kept == len(self._plans) or state.plans[0].from_round <= oldest
        _require(is_whole, f"the plan of round {oldest} is not kept")

    def _check_slots(self, state: State) -> None:
        slots = [reserved.slot for reserved in state.reservations.values()]
        _require(len(set(slots)) == len(slots), "a slot is reserved for two peers")
        for peer, assignment in state.assignments[state.epoch].items() if state.plans else ():
            if state.takes_part(peer, state.plans[-1].from_round) and state.peers[peer].is_staying:
                slot = assignment.replica.index, assignment.position
                _require(state.reservations[peer].slot == slot, f"{peer} has another slot reserved")

    def _check_tiling(self, state: State) -> None:
        """The samples of all rounds up to the current one: none is assigned twice, none is left out."""
        tiled, start = self._tiled, self._next_sample
        for number in range(tiled + 1, state.current_round + 1):
            plan = state.plan_for(number)
            for replica in plan.replicas:
                part = sample_range(plan, self._spec, number, replica.index)
                _require(part.start == start, f"round {number}: {replica.name} begins at {part.start}")
                start = part.stop
            if number < state.current_round:  # the samples of the current round may still be divided anew
                self._tiled, self._next_sample = number, start


def _where(decision: Decision) -> str:
    return f"round {decision.round_number} of stage {decision.stage}"


def _require(holds: bool, sentence: str) -> None:
    if not holds:
        raise InvariantBroken(sentence)
