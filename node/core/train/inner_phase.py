"""The inner phases of one member, seen from the main process: their steps, and how long these took."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from node.core.train.pipeline import Pipeline
from node.core.train.services import Services
from node.ipc.worker_calls import AssignSamples, BeginRound, EndInnerPhase
from node.net.membership import PeerAssignment
from protocol.math.flops import microbatch_flops
from protocol.math.sampling import sample_range
from protocol.status import Measurement

log = logging.getLogger(__name__)


class InnerLoop:
    """One inner phase after the other. Each may begin before the decision of the round before it.

    Args:
        between_steps: a lock that is held while an inner step computes.

    Attributes:
        round_number, seconds: of the inner phase that has begun last; 0 before any.
    """

    def __init__(self, services: Services, pipeline: Pipeline, between_steps: asyncio.Lock) -> None:
        self._spec, self._services, self._pipeline = services.spec, services, pipeline
        self._between_steps = between_steps
        self._step_seconds = 0.0
        self._assignment: PeerAssignment
        self._samples: range
        self._start(0)

    def _start(self, round_number: int) -> None:
        self.round_number, self.seconds = round_number, 0.0
        self._done = self._microbatches = self._bytes_sent = 0  # `_done` counts the steps of the phase
        self._is_over = False  # whether the replica has ended the phase
        self._beyond_seconds = 0.0

    async def begin(self, assignment: PeerAssignment, round_number: int) -> None:
        """Begin the inner phase of a round, at the step of its replica. Call :meth:`train` next."""
        self._assignment, self._samples = assignment, self._samples_of(assignment, round_number)
        await self._services.worker.call(BeginRound(round_number, self._samples))
        self._start(round_number)
        self._done = assignment.first_step(round_number)

    def go_on(self, assignment: PeerAssignment, pipeline: Pipeline) -> None:
        """Continue the phase with other neighbours, at the first step that no member has finished."""
        self._assignment, self._pipeline = assignment, pipeline
        self._done = assignment.first_step(self.round_number)

    async def resume(self, assignment: PeerAssignment) -> None:
        """Continue the phase that was begun ahead, under a plan that may have changed since.

        The remaining steps train on the samples that the new plan gives to them.
        """
        self._assignment, samples = assignment, self._samples_of(assignment, self.round_number)
        if samples != self._samples:
            self._samples = samples
            await self._services.worker.call(AssignSamples(samples))

    @property
    def done(self) -> int:
        """The first step of the phase, 0-based, that is not done."""
        return self._done

    def is_ahead_of(self, round_number: int) -> bool:
        """Whether any step of a later round than `round_number` is trained."""
        return self.round_number > round_number and self._done > 0

    async def train(self, ahead: int | None = None) -> None:
        """Train the first `ahead` steps, or with None the rest of the H steps, after which the phase is over.

        Trains fewer steps if the round has no time for more.
        """
        began, sent_before = self._now() - self.seconds, self._pipeline.bytes_sent
        try:
            while not self._is_over and self._done != ahead:
                self._services.membership.progress = (self.round_number, self._done)
                if not await self._pipeline.phase(self.round_number, self._done, self._has_time()):
                    self._is_over = True
                    break
                step_began = self._now()
                await self._step(self.round_number, self._done)
                self._step_seconds = self._now() - step_began
                self._done += 1
        finally:  # a chain that breaks goes on with other links
            self.seconds = self._now() - began
            self._bytes_sent += self._pipeline.bytes_sent - sent_before

    async def train_beyond(self, round_number: int, step: int) -> None:
        """Train an extra step, `step` > H, while a round is exchanged. The phase does not count it."""
        began = self._now()
        await self._step(round_number, step)
        self._beyond_seconds += self._now() - began

    async def end(self) -> Measurement:
        """End the phase. Returns what was measured of it, with everything else at 0."""
        spec, replica = self._spec, self._assignment.replica
        report = await self._services.worker.call(EndInnerPhase())
        result, self._services.figures.memory_bytes = report.result, report.memory_bytes
        if result.skipped_steps:
            skipped = result.skipped_steps
            log.warning("round %d: %d steps had gradients that are not finite", self.round_number, skipped)
        if result.steps < spec.inner.steps:
            log.info("round %d: %d of %d steps", self.round_number, result.steps, spec.inner.steps)
        self._estimate(report.compute_seconds)
        return replace(
            empty_measurement(self._assignment, self.round_number),
            train_loss=result.loss,
            tokens=result.tokens,
            steps=result.steps,
            gradient_norm=result.gradient_norm,
            nonfinite_step=result.nonfinite_step,
            inner_seconds=self.seconds,
            compute_seconds=report.compute_seconds,
            microbatches=spec.microbatches_of(replica),
            link_bytes_sent=self._bytes_sent,
            link_bytes_dense=self._pipeline.dense_bytes_per_round,
        )

    async def _step(self, round_number: int, step: int) -> None:
        async with self._between_steps:
            await self._pipeline.inner_step(round_number, step)
        self._services.figures.inner_steps += 1
        self._microbatches += self._spec.microbatches_of(self._assignment.replica)

    def _has_time(self) -> bool:
        """Whether the replica has time for one more step of the phase before it proposes its payloads."""
        if self._done >= self._spec.inner.steps:
            return False
        closes = self._services.membership.closes_in(self.round_number)
        # Time for one more step is left over, because proposing takes time, too.
        return closes is None or closes > 2 * self._step_seconds

    def _estimate(self, compute_seconds: float) -> None:
        """Update the estimates of the speed of this node and of its replica."""
        estimates, done = self._services.membership.estimates, self._microbatches
        stages = self._assignment.replica.members[self._assignment.position].stages
        estimates.computed(done * microbatch_flops(self._spec, stages), compute_seconds)
        seconds = self.seconds + self._beyond_seconds
        estimates.replica_took(seconds / done if done and self._assignment.is_first else 0.0)

    def _samples_of(self, assignment: PeerAssignment, round_number: int) -> range:
        return sample_range(assignment.plan, self._spec, round_number, assignment.replica.index)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def empty_measurement(assignment: PeerAssignment, round_number: int) -> Measurement:
    """A measurement of this member in a round, with all figures at 0."""
    return Measurement(
        peer=assignment.replica.members[assignment.position].peer,
        round_number=round_number,
        replica=assignment.replica.index,
        position=assignment.position,
        complete=assignment.is_last,
    )
