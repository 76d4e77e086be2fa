"""What every page shows: one moment of the run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from coordinator.placement.cost_model import Survey, survey_of
from coordinator.placement.obstacles import obstacles
from coordinator.state.cause_text import cause_text
from coordinator.state.state import State
from protocol.algorithm.turns import due_stages
from protocol.status import Measurement, PeerStatus, RunPhase, RunStatus
from protocol.types import PeerId, Replica, StageRange


@dataclass(frozen=True)
class RunView:
    """The run status, and the state that it was built from."""

    state: State
    status: RunStatus

    @cached_property
    def peers(self) -> dict[PeerId, PeerStatus]:
        return {peer.peer: peer for peer in self.status.peers}

    @cached_property
    def replicas(self) -> tuple[Replica, ...]:
        """Those of the current round."""
        if not self.state.plans:
            return ()
        return self.state.plan_for(self.round_number).replicas

    @cached_property
    def round_number(self) -> int:
        """The round that is open, or the last one; 0 before the first."""
        return min(self.state.current_round, self.status.spec.rounds)

    @cached_property
    def complete(self) -> frozenset[int]:
        """The replicas in which every member takes part."""
        if not self.state.plans:
            return frozenset()
        return frozenset(each.index for each in self.state.complete_replicas(self.round_number))

    @cached_property
    def obstacles(self) -> dict[int, str]:
        """By replica: why it cannot train."""
        found = obstacles(self.state, self.round_number) if self.is_training else {}
        return {index: cause_text(each) for index, each in found.items()}

    @cached_property
    def waiting(self) -> dict[int, list[tuple[StageRange, PeerId | None]]]:
        """By replica that is reserved and in no plan of this round: stages and peer of each position."""
        planned = {replica.index for replica in self.replicas}
        reserved = {each.slot: each.peer for each in self.state.reservations.values()}
        return {
            index: [
                (stages, reserved.get((index, position)))
                for position, stages in enumerate(self.state.layout(index))
            ]
            for index in sorted({replica for replica, _ in reserved} - planned)
        }

    @property
    def is_training(self) -> bool:
        return self.status.phase is RunPhase.TRAINING

    @cached_property
    def measured(self) -> dict[PeerId, Measurement]:
        """The newest measurement of each peer that has measured a round."""
        return {each.peer: each for each in self.status.measurements}

    @cached_property
    def last_measured(self) -> dict[int, Measurement]:
        """By replica: the newest measurement of a last member, which knows loss and tokens."""
        found: dict[int, Measurement] = {}
        for each in self.status.measurements:
            known = found.get(each.replica)
            if each.complete and (known is None or known.round_number < each.round_number):
                found[each.replica] = each
        return found

    @cached_property
    def survey(self) -> Survey:
        """What the peers have measured of themselves and of their links."""
        return survey_of(self.state)


def phase_of(view: RunView, replica: Replica) -> tuple[str, str]:
    """What `replica` does in the open round: a word for programs, and a sentence for people."""
    state, number = view.state, view.round_number
    if replica.index not in view.complete:
        return "broken", view.obstacles.get(replica.index, "a member is missing")
    if not view.is_training or state.is_held:
        waits = ("paused", "waits for the end of the pause")
        return waits if view.is_training else ("done", "the run is over")
    answers = [_answer_of(view, replica, stage) for stage in due_stages(state.spec, number)]
    if all(answer == "decided" for answer in answers):
        return "decided", f"round {number} is decided"
    if not any(answers):
        return "trains", "trains"
    if any(answer in ("", "open") for answer in answers):
        return "offered", "has trained, and waits for the payloads of others"
    return "exchanges", "exchanges payloads"


def _answer_of(view: RunView, replica: Replica, stage: int) -> str:
    """How far `replica` is with `stage` in the open round: "" before its offer."""
    key = (stage, view.round_number)
    if view.state.is_decided(*key):
        return "decided"
    host, open_round = replica.host_of(stage).peer, view.state.round_of(*key)
    if host not in open_round.offers and host not in open_round.withheld:
        return ""
    return "open" if open_round.group is None else "grouped"
