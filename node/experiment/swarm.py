"""All replicas of a run in this process, one after the other: no sockets, no clocks, no failures.

Trainers, codec, rounds and samples are those of a real swarm, so the loss that comes out is that of the
algorithm as it runs, and the same spec gives the same bits again.

    swarm = LocalSwarm(spec)
    for _ in range(spec.rounds):
        print(swarm.round(), swarm.validate())
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from node.data.stream import SampleStream, open_stream
from node.experiment.replicas import LocalReplica, average_gradients, plan_of
from node.experiment.variation import UNVARIED, Steering, Variation, weighted
from node.train.inner import InnerResult
from protocol.samples import sample_range
from protocol.spec import RunSpec
from protocol.types import Plan


@dataclass(frozen=True)
class RoundReport:
    """What happened in one round.

    Attributes:
        inner: what each replica learned from, in the order of the plan.
        contributions: payloads that count, by stage; 0 where nobody had anything finite to offer, so that the
            stage was left as it was.
        payload_bytes: of all payloads that were made.
        link_bytes: payload bytes of all frames between members since the last report.
    """

    round: int
    inner: tuple[InnerResult, ...]
    contributions: tuple[int, ...]
    payload_bytes: int
    link_bytes: int

    @property
    def train_loss(self) -> float:
        """Mean over the replicas, of all microbatches of their inner steps."""
        return sum(result.loss for result in self.inner) / len(self.inner)


@dataclass(frozen=True)
class _Offer:
    payload: bytes
    weight: float


class LocalSwarm:
    """The replicas of `spec`, from its initial parameters on.

    Memory is that of all replicas: parameters, moments, anchor and error feedback of each.

    Args:
        spec: the run. `outer.overlap` steps of the next round are trained between proposal and commit, as in
            a real swarm; what depends on seconds (`timing`) has no meaning here.
        device: a torch device name, of all replicas. How many threads compute is the caller's affair.
        stream: the samples, opened for a spec with the same data, model and seed; opened here by default.
        plan: other replicas than those of :func:`plan_of`, such as with links of unlike k. Its rounds start
            with 1.
        variation: how it departs from the algorithm.

    Raises:
        HetnodeError: as :func:`open_stream`; DEVICE_UNAVAILABLE.

    Attributes:
        replicas: in the order of the plan.
        position: rounds that are over.
    """

    def __init__(
        self,
        spec: RunSpec,
        device: str = "cpu",
        stream: SampleStream | None = None,
        plan: Plan | None = None,
        variation: Variation = UNVARIED,
    ) -> None:
        stream = stream or open_stream(spec)
        self.position = 0
        self._spec, self._plan = spec, weighted(plan or plan_of(spec), variation)
        self._variation, self._steering = variation, Steering(spec, variation)
        self.replicas = tuple(
            LocalReplica(spec, each, device, stream, self._steering.parts) for each in self._plan.replicas
        )
        for replica in self.replicas:
            self._steering.watch(replica)
        self._steering.connect(0, self.replicas)
        self._inner: tuple[InnerResult, ...] | None = None
        self._bytes_reported = 0
        self._begin_round(1)

    def round(self) -> RoundReport:
        """One whole round: inner phase and outer exchange."""
        self.train()
        return self.exchange()

    def train(self) -> None:
        """The rest of the inner phase on all replicas: now :meth:`exchange` follows."""
        assert self._inner is None, "a round is exchanged before the next one is trained"
        assert self.position < self._spec.rounds, "the run is over"
        self._train(range(self._trained, self._spec.inner.steps))
        self._inner = tuple(replica.end_inner_phase() for replica in self.replicas)

    def exchange(self) -> RoundReport:
        """All replicas propose, train the steps that overlap, and commit what counts."""
        assert self._inner is not None, "a round is trained before it is exchanged"
        round_, inner, stages = self.position + 1, self._inner, range(self._spec.swarm.stages)
        offers = [self._propose(stage) for stage in stages]
        if round_ < self._spec.rounds:
            self._begin_round(round_ + 1)
        contributions = tuple(self._settle(stage, round_, offers[stage]) for stage in stages)
        self._steering.after_round(round_, self.replicas)
        self.position, self._inner = round_, None
        sent = sum(replica.bytes_sent for replica in self.replicas)
        report = RoundReport(
            round_,
            inner,
            contributions,
            payload_bytes=sum(len(offer.payload) for offered in offers for offer in offered.values()),
            link_bytes=sent - self._bytes_reported,
        )
        self._bytes_reported = sent
        return report

    def validate(self) -> list[float]:
        """Validation loss (nats per token) of every replica, in its own forward mode.

        Of the replica's own parameters: the anchor, and with `outer.overlap` what it has learned since of the
        round that has begun; after the last round the anchor alone.
        """
        return [replica.validate() for replica in self.replicas]

    def _begin_round(self, round_: int) -> None:
        """Give out the samples of `round_` and, while the one before is exchanged, train what overlaps."""
        self._trained = self._spec.outer.overlap if round_ > 1 else 0
        for replica, planned in zip(self.replicas, self._plan.replicas, strict=True):
            if self._trained:
                replica.keep_training()
            replica.begin_round(round_, sample_range(self._plan, self._spec, round_, planned.index))
        self._train(range(self._trained))

    def _train(self, steps: range) -> None:
        """These inner steps on all replicas: one replica after the other, where they need not wait."""
        if self._variation.average_gradients:
            for step in steps:
                for replica in self.replicas:
                    replica.accumulate(step)
                average_gradients(self.replicas)
                for replica in self.replicas:
                    self._apply(replica, step)
        else:
            for replica in self.replicas:
                for step in steps:
                    replica.accumulate(step)
                    self._apply(replica, step)

    def _apply(self, replica: LocalReplica, step: int) -> None:
        replica.apply(step)
        self._steering.after_step(replica)

    def _propose(self, stage: int) -> dict[int, _Offer]:
        """Of those replicas that have something to give, by position, in canonical order: by owner."""
        assert self._inner is not None
        planned, offers = self._plan.replicas, {}
        for position in sorted(range(len(planned)), key=lambda each: planned[each].host_of(stage).peer):
            share = min(1.0, self._inner[position].steps / self._spec.inner.steps)
            if share < self._spec.recovery.least_share:
                continue
            payload = self.replicas[position].host_of(stage).propose(stage)
            if payload is not None:
                offers[position] = _Offer(payload, planned[position].weight * share)
        return offers

    def _settle(self, stage: int, round_: int, offers: Mapping[int, _Offer]) -> int:
        """Bring all anchors of `stage` to the round's outcome. Returns how many payloads count."""
        hosts = [replica.host_of(stage) for replica in self.replicas]
        problems = hosts[0].screen(stage, [offer.payload for offer in offers.values()])
        counted = [position for position, problem in zip(offers, problems, strict=True) if not problem]
        payloads = [(offers[position].payload, offers[position].weight) for position in counted]
        if payloads:
            digests = {
                host.commit(stage, round_, payloads, position in counted)
                for position, host in enumerate(hosts)
            }
            assert len(digests) == 1, f"the anchors of stage {stage} differ after round {round_}"
        else:
            for host in hosts:
                host.abort(stage, round_)
        if stage == 0:
            for replica in self.replicas:
                for member in replica.members[1:]:
                    member.commit_embedding(round_, payloads)
        return len(counted)
