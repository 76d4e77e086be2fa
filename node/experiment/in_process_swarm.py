"""All replicas of a run in this process, one after the other: no sockets, no clocks, no failures.

Trainers, codec, rounds and samples are those of a real swarm. So the losses are those of the real algorithm,
and the same spec always gives the same bits.

    swarm = LocalSwarm(spec)
    for _ in range(spec.rounds):
        print(swarm.train_round(), swarm.validate())
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor

from node.core.optimizer.outcome import Outcome, WeightedPayload, agreed_results
from node.core.worker.compute import Compute
from node.data.stream import SampleStream, open_stream
from node.experiment import swarm_checkpoint
from node.experiment.in_process_replica import LocalReplica, average_gradients, plan_of
from node.experiment.offload import ReplicaOffload
from node.experiment.swarm_checkpoint import SavedReplica
from node.experiment.variation import UNVARIED, Variation
from node.experiment.variation_runner import VariationRunner, plans_of, varied
from node.ipc.worker_calls import InnerResult
from protocol.errors import ErrorCode, HetnodeError
from protocol.math.sampling import sample_range
from protocol.math.turns import due_stages
from protocol.spec.fixed import LEAST_SHARE
from protocol.spec.run import RunSpec
from protocol.types import Plan

_PHASE = "losses", "tokens", "steps", "skipped_steps", "norm"
"""What is saved of the inner phase of a member (node.core.worker.phase)."""


@dataclass(frozen=True)
class RoundReport:
    """What happened in one round.

    Attributes:
        inner: result of the inner phase of each replica that trains, in the order of the plan.
        contributions: payloads that count, by stage; 0 if no replica had finite values, or the stage was
            not due, so that it was left as it was.
        payload_bytes: total size of all proposed payloads.
        link_bytes: payload bytes of all frames between members since the last report.
    """

    round_number: int
    inner: tuple[InnerResult, ...]
    contributions: tuple[int, ...]
    payload_bytes: int
    link_bytes: int

    @property
    def train_loss(self) -> float:
        """Mean over the replicas of their mean loss over all microbatches."""
        return sum(result.loss for result in self.inner) / len(self.inner)


@dataclass(frozen=True)
class _Phase:
    """Result of a replica's inner phase, and its pending payloads by stage."""

    result: InnerResult
    payloads: Mapping[int, bytes]


@dataclass(frozen=True)
class _Outcome:
    """Accepted payloads of a stage, in canonical order. `owners` are the replicas' positions in the plan."""

    payloads: tuple[WeightedPayload, ...]
    owners: frozenset[int]


class LocalSwarm:
    """The replicas of `spec`. They start with its initial parameters.

    Each resident replica needs memory for parameters, gradients, moments and error feedback. All replicas
    share one anchor.

    Args:
        spec: the run. `outer.overlap` steps of the next round are trained between proposal and commit, as in
            a real swarm. Durations in seconds (`timing`) are ignored here.
        compute: how all replicas compute. The caller sets the number of threads.
        stream: the samples, opened for a spec with the same data, model and seed. Opened here by default.
        plan: replaces the plan of :func:`plan_of`, for example to give links different k. Its first round is
            1.
        variation: how training differs from the algorithm.
        resident: number of replicas on the device at the same time; it changes no bit. The
            others wait in main memory. 0: all.

    Raises:
        HetnodeError: as :func:`open_stream`; DEVICE_UNAVAILABLE; BAD_OPTION if the variation needs all
            replicas in memory.

    Attributes:
        spec: the run.
        plan: the replicas, with their weights and links.
        replicas: in the order of the plan. If not all are resident, finish with one before taking the next.
        position: number of finished rounds.
        steering: applies the variation.
        exchange_of_all: that of an exchange whose members agree on one result; else None.
    """

    def __init__(
        self,
        spec: RunSpec,
        compute: Compute = Compute(),  # noqa: B008  frozen
        stream: SampleStream | None = None,
        plan: Plan | None = None,
        variation: Variation = UNVARIED,
        resident: int = 0,
    ) -> None:
        stream = stream or open_stream(spec)
        self.position = 0
        self.spec, self.plan = spec, varied(plan or plan_of(spec), variation)
        self._plans = plans_of(spec, self.plan, variation)
        self._variation = variation
        self.steering = steering = VariationRunner(spec, variation)
        self._initial = initial = dict[int, dict[str, Tensor]]()
        planned = self.plan.replicas

        def build(index: int) -> LocalReplica:
            replica = LocalReplica(spec, planned[index], compute, stream, steering.factories)
            replica.share_committed(initial)
            steering.watch(replica)
            return replica

        ready = min(resident or len(planned), len(planned))
        if variation.average_gradients and ready < len(planned):
            raise HetnodeError(
                ErrorCode.BAD_OPTION,
                "Replicas that average their gradients must all be in memory at the same time.",
                "Leave out resident, or average_gradients.",
            )
        self.replicas = ReplicaOffload(len(planned), build, ready)
        self.steering.connect(0, self.replicas)
        results = agreed_results(spec)
        self.exchange_of_all = None if results is None else results.local(spec, len(planned))
        self._phases: tuple[_Phase, ...] | None = None
        self._link_bytes = 0
        self._begin_round(1)

    def train_round(self) -> RoundReport:
        """One whole round: inner phase and outer exchange."""
        self.train()
        return self.exchange()

    def train(self) -> None:
        """Finish the inner phase on all replicas and make their proposals. Call :meth:`exchange` next."""
        assert self._phases is None, "call exchange() before the next train()"
        assert self.position < self.spec.rounds, "the run is over"
        steps = range(self._trained, self.spec.inner.steps)
        self._phases = tuple(
            self._end_phase(replica) for replica in self._trained_on(self.position + 1, steps)
        )

    def exchange(self) -> RoundReport:
        """Decide which payloads count, train the overlapping steps of the next round, then commit."""
        assert self._phases is not None, "call train() before exchange()"
        round_number, phases = self.position + 1, self._phases
        outcomes = [self._decide(stage) for stage in range(self.spec.swarm.stages)]
        if round_number < self.spec.rounds:
            # Before the commit: with overlap a real replica trains while it waits for the payloads of others.
            self._begin_round(round_number + 1)
        self._settle(round_number, outcomes)
        self._restart_newcomers(round_number)
        self.steering.after_round(round_number, self.replicas)
        self.position, self._phases = round_number, None
        report = RoundReport(
            round_number,
            inner=tuple(phase.result for phase in phases),
            contributions=tuple(len(outcome.payloads) for outcome in outcomes),
            payload_bytes=sum(len(payload) for phase in phases for payload in phase.payloads.values()),
            link_bytes=self._link_bytes,
        )
        self._link_bytes = 0
        return report

    def validate(self) -> list[float]:
        """Validation loss (nats per token) of every replica, with the compression of its own links.

        It uses the local parameters of the replica. These are the anchor, plus with
        `outer.overlap` the progress of the overlapping steps. After the last round they are the anchor only.
        """
        return [replica.validate() for replica in self.replicas]

    def save(self, folder: Path) -> None:
        """Save all that :meth:`restore` needs below `folder`, and replace an older save. Between two rounds.

        Raises:
            HetnodeError: DISK_FULL; the older save is unchanged.
        """
        assert self._phases is None, "a swarm can be saved only between two rounds"

        def replicas() -> Iterator[SavedReplica]:
            for replica in self.replicas:
                phases = [
                    {name: getattr(member.phase, name) for name in _PHASE} for member in replica.members
                ]
                yield SavedReplica(replica.bytes_sent, phases, replica.private_states())

        held = self.replicas[0]
        stages = range(self.spec.swarm.stages)
        anchors = {stage: held.host_of(stage).outer[stage].committed for stage in stages}
        steering = self.steering.state_dict()
        if self.exchange_of_all is not None:
            steering |= self.exchange_of_all.state_dict()
        swarm_checkpoint.write(
            folder, self._terms, self.position, self._link_bytes, steering, anchors, replicas()
        )

    def restore(self, folder: Path) -> bool:
        """Continue from the save below `folder`, with the same bits as without an interruption.

        Call it on a new swarm. Returns False if there is no usable save; then the swarm is unchanged, and the
        log has the reason.
        """
        assert self.position == 0, "a swarm can be restored only before its first round"
        found = swarm_checkpoint.newest(folder, self._terms)
        if found is None:
            return False
        shared, phases = dict[int, dict[str, Tensor]](), list[list[dict[str, Any]]]()
        for index, replica in enumerate(self.replicas):
            saved = found.replica(index)
            phases.append(saved.phases)
            replica.load_checkpoint(found.position, found.anchors, saved.private)
            replica.share_committed(shared)
            replica.bytes_sent = saved.bytes_sent
        self._initial.clear()
        self.position, self._link_bytes = found.position, found.link_bytes
        self.steering.load_state_dict(found.steering)
        if self.exchange_of_all is not None:
            self.exchange_of_all.load_state_dict(found.steering)
        self.steering.connect(found.position, self.replicas)
        if found.position < self.spec.rounds:
            self._trained = self._open_round(found.position + 1)

        def resume(position: int, replica: LocalReplica) -> None:
            for member, phase in zip(replica.members, phases[position], strict=True):
                for name, value in phase.items():
                    setattr(member.phase, name, value)

        self.replicas.each(resume)
        return True

    @property
    def _terms(self) -> str:
        """Digest of everything that affects the bits: specification, variation and plan."""
        terms = {"spec": self.spec.hash, "variation": self._variation.changes, "plan": repr(self.plan)}
        return hashlib.sha256(json.dumps(terms, sort_keys=True).encode()).hexdigest()

    def _begin_round(self, round_number: int) -> None:
        """Assign the samples of `round_number`, and train the steps that overlap with the exchange before."""
        self._trained = self._open_round(round_number)
        if self._trained:
            for _ in self._trained_on(round_number, range(self._trained)):
                pass

    def _open_round(self, round_number: int) -> int:
        """Assign the samples of `round_number`. Returns how many of its steps overlap with the exchange."""
        overlap = self.spec.outer.overlap if round_number > 1 else 0

        def begin(position: int, replica: LocalReplica) -> None:
            if overlap:
                replica.keep_training()
            self._assign(position, replica, round_number)

        self.replicas.each(begin)
        return overlap

    def _assign(self, position: int, replica: LocalReplica, round_number: int) -> None:
        plan, spec = self._plan_for(round_number), self.spec
        if position < len(plan.replicas):
            samples = sample_range(plan, spec, round_number, plan.replicas[position].index)
            replica.begin_round(round_number, samples)

    def _plan_for(self, round_number: int) -> Plan:
        """The plan in which a round is trained. Its replicas are the first of all."""
        return next(plan for plan in reversed(self._plans) if plan.from_round <= round_number)

    def _restart_newcomers(self, round_number: int) -> None:
        """Replicas that did not train in `round_number` and do in the next begin as peers that join.

        They have the anchor, no error feedback and no moments.
        """
        before, after = (len(self._plan_for(each).replicas) for each in (round_number, round_number + 1))

        def restart(position: int, replica: LocalReplica) -> None:
            if before <= position < after:
                replica.load_anchor(round_number)
                self._assign(position, replica, round_number + 1)

        if before < after:
            self.replicas.each(restart)

    def _trained_on(self, round_number: int, steps: range) -> Iterator[LocalReplica]:
        """Yield each replica that trains in the round after it has taken these inner steps.

        Without gradient averaging the next replica starts only then, so few replicas need be in memory.
        """
        if self._variation.average_gradients:
            sent = sum(replica.bytes_sent for replica in self.replicas)
            for step in steps:
                for replica in self.replicas:
                    replica.accumulate(step)
                average_gradients(self.replicas)
                for replica in self.replicas:
                    self._apply(replica, step)
            self._link_bytes += sum(replica.bytes_sent for replica in self.replicas) - sent
            yield from self.replicas
        else:
            for replica in islice(self.replicas, len(self._plan_for(round_number).replicas)):
                sent = replica.bytes_sent
                for step in steps:
                    replica.accumulate(step)
                    self._apply(replica, step)
                self._link_bytes += replica.bytes_sent - sent
                yield replica

    def _apply(self, replica: LocalReplica, step: int) -> None:
        replica.apply(step)
        self.steering.after_step(replica)

    def _end_phase(self, replica: LocalReplica) -> _Phase:
        """End the inner phase. Propose only if the replica has taken enough of the spec's steps."""
        result = replica.end_inner_phase()
        counts = self._share(result) >= LEAST_SHARE
        stages = due_stages(self.spec, self.position + 1) if counts else ()
        return _Phase(result, replica.propose(stages, self._share(result)))

    def _share(self, result: InnerResult) -> float:
        """Share of the spec's steps that were taken, at most 1."""
        return min(1.0, result.steps / self.spec.inner.steps)

    def _decide(self, stage: int) -> _Outcome:
        """The accepted payloads for `stage`, in canonical order: by the id of the member that sent them."""
        assert self._phases is not None
        planned, phases = self._plan_for(self.position + 1).replicas, self._phases
        weights = [
            each.weight * self._share(phase.result) for each, phase in zip(planned, phases, strict=True)
        ]
        offering = [position for position, phase in enumerate(phases) if stage in phase.payloads]
        offering.sort(key=lambda position: planned[position].host_of(stage).peer)
        payloads = [phases[position].payloads[stage] for position in offering]
        # All replicas would get the same result. The last one was used last, so it is resident.
        problems = self.replicas[-1].host_of(stage).outer[stage].screen(payloads)
        counted = [position for position, problem in zip(offering, problems, strict=True) if not problem]
        weighted = ((phases[each].payloads[stage], weights[each]) for each in counted)
        return _Outcome(tuple(weighted), frozenset(counted))

    def _settle(self, round_number: int, outcomes: Sequence[_Outcome]) -> None:
        """Apply the outcome of the round on all replicas. Then they share one anchor again."""
        self._initial.clear()  # all replicas exist, so the initial anchor can be freed
        digests: list[list[str]] = []
        shared: dict[int, dict[str, Tensor]] = {}
        committed = [self._agreed(stage, outcome) for stage, outcome in enumerate(outcomes)]

        def settle(position: int, replica: LocalReplica) -> None:
            own = [
                (each, position in outcome.owners) for each, outcome in zip(committed, outcomes, strict=True)
            ]
            digests.append(replica.settle(round_number, own))
            assert digests[-1] == digests[0], f"anchors differ after round {round_number}"
            replica.share_committed(shared)

        self.replicas.each(settle)

    def _agreed(self, stage: int, outcome: _Outcome) -> Outcome:
        """What the replicas apply to `stage`; no payloads for an aborted round."""
        if self.exchange_of_all is None or not outcome.payloads:
            return outcome.payloads
        return self.exchange_of_all.result(stage, outcome.payloads)
