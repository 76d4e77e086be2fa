"""A member trains in one replica: links, inner phases, exchanges and validations, round after round.

Read :meth:`ReplicaSession.run` top to bottom. It ends with the run, with a plan that changes this replica, or
when this node has to leave. It raises every other failure, and nothing of an unfinished inner step counts.
Where the chain breaks, this member waits until another peer has the seat of the one that is lost, and goes on
with the steps that it has finished. If none comes, it ends the round alone: these steps count in that round.

One file because a chain may break at every wait of a round, and each of them ends in the same way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from typing import TypeAlias, TypeVar

from node.core.train.chain import OpenChain
from node.core.train.exchange_round import RoundExchange, RoundOutcome
from node.core.train.inner_phase import InnerLoop, empty_measurement
from node.core.train.member_anchors import MemberAnchors
from node.core.train.replica_links import have_same_links
from node.core.train.round_gates import RoundGates
from node.core.train.services import Services
from node.ipc.worker_calls import Abandon, KeepTraining
from node.net.cancellation import LeaveRequested, cancel_when, cancel_when_failed, cancel_when_leaving
from node.net.measurements import Measurements
from node.net.membership import PeerAssignment, RunView
from protocol.errors import ErrorCode, HetnodeError
from protocol.spec.fixed import EXTRA_STEPS
from protocol.status import Measurement, Wait
from protocol.types import Plan

log = logging.getLogger(__name__)
T = TypeVar("T")

_AWAY_SECONDS = 2.0
_POLL_SECONDS = 0.5
_PARTING_SECONDS = 5.0
_OFFER_SECONDS = 1.0
"""An offer reaches the coordinator within these. After a retreat the round no longer waits for it."""
_BREAKS = (ErrorCode.NEIGHBOUR_LOST, ErrorCode.FRAME_CORRUPT, ErrorCode.FRAME_TOO_LARGE)
"""What ends the links of a replica, and leaves its members with what they have learned."""
UNLINKED = (*_BREAKS, ErrorCode.NEIGHBOUR_UNREACHABLE)
"""What leaves a member able to go on with other neighbours."""
GiveUp: TypeAlias = Callable[[PeerAssignment, BaseException, int | None], Awaitable[float]]


class Superseded(Exception):
    """The assignment of this node has ended: there is another plan, or the node has joined again."""


class ReplicaSession:
    """One assignment of this node, and those of later plans that keep its replica.

    Args:
        assignment: training starts in the round after the position of `anchors`.
        leaving: set when this node has to leave: it then trains to the end of the round.
        after_round: called after every round, to write a checkpoint where one is due.
        give_up: tells the coordinator that the replica of an assignment cannot go on, and why. With the steps
            that this member has done in the round, it returns for how many seconds to wait for a repair.

    Attributes:
        assignment: under the newest plan that has kept the replica.
    """

    _inner: InnerLoop

    def __init__(
        self,
        services: Services,
        assignment: PeerAssignment,
        anchors: MemberAnchors,
        leaving: asyncio.Event,
        after_round: Callable[[int], Awaitable[None]],
        give_up: GiveUp,
    ) -> None:
        self.assignment = assignment
        self._spec, self._services, self._anchors = services.spec, services, anchors
        self._exchange = RoundExchange(services, anchors)
        self._leaving, self._after_round, self._give_up = leaving, after_round, give_up
        self._measurements = Measurements(self._tell, lambda: self.assignment.plan.size)
        self._chain = OpenChain(services)
        self._last: int | None = None  # the round after which this node leaves
        self._broken: HetnodeError | None = None  # what has broken the chain
        self._entered = 0  # the round within which this member has taken its seat

    async def run(self) -> None:
        """Train until the run is over, a plan changes this replica, or this node leaves.

        Raises Superseded, or HetnodeError (alone or in an ExceptionGroup) where the replica cannot go on.
        """
        spec, peer = self._spec, self._services.identity.peer
        first, changes = self._anchors.position + 1, self.assignment.plan.changes
        async with AsyncExitStack() as stack:
            stack.callback(self._measurements.drop)
            await stack.enter_async_context(self._chain)
            await self._open_chain(first)
            if first == 1 and not self.assignment.first_step(first):
                before = empty_measurement(self.assignment, 0)
                await self._measure(replace(before, validation_loss=await self._chain.pipeline.validate(0)))
            self._inner = InnerLoop(self._services, self._chain.pipeline, self._anchors.between_steps)
            for round_number in range(first, spec.rounds + 1):
                may_begin = self._until_not_held(round_number)
                if not await self._cancel_when_superseded(may_begin, round_number):
                    await self._chain.pipeline.part(_PARTING_SECONDS)
                    return
                # Where other replicas have another anchor, training from it is of no use.
                training = cancel_when(self._anchors.attestations.failure(), self._train_round(round_number))
                outcome = await self._cancel_when_superseded(training, round_number)
                await self._after_round(round_number)
                if self._broken is not None:
                    raise self._broken
                if round_number == spec.rounds:
                    break
                plan = await self._cancel_when_superseded(self._plan(outcome.next_epoch), round_number)
                if plan.epoch != self.assignment.plan.epoch:
                    log.info("%s", plan.reason)
                replica, is_changed = plan.replica_of(peer), plan.changes != changes
                if replica is None or is_changed or not have_same_links(replica, self.assignment.replica):
                    break
                if self._leaving.is_set() and round_number >= self._last_round(round_number):
                    # The next plan was made before the request to leave, and counts on this node: the
                    # neighbours will find the links closed. Their validation still needs the links now.
                    await self._chain.pipeline.part(_PARTING_SECONDS)
                    return
                self.assignment = PeerAssignment(plan, replica, self.assignment.position)
                await self._chain.adopt(self.assignment, round_number + 1)
            await self._chain.pipeline.part()
            await self._measurements.told()
        await self._anchors.attestations.told()

    async def _open_chain(self, round_number: int) -> None:
        opening = self._chain.open(self.assignment, round_number)
        await self._cancel_when_superseded(opening, round_number, is_opening=True)

    async def _until_not_held(self, round_number: int) -> bool:
        """Wait for the end of a pause of the run. False where this node has to leave before that.

        A round that is decided during the pause is held no longer: only its decision remains to be applied.
        """
        membership = self._services.membership
        if not membership.run_view.is_held(round_number):
            return True
        log.info("waiting for the end of the pause before round %d", round_number)
        membership.progress = (round_number, 0)
        released = membership.until(lambda run_view: None if run_view.is_held(round_number) else True)
        with self._services.figures.waits.on(Wait.PAUSE):
            try:
                return await cancel_when_leaving(self._leaving, released)
            except LeaveRequested:
                return False

    def _last_round(self, round_number: int) -> int:
        """The round after which this node leaves although the next plan counts on it."""
        if self._last is None:
            # Steps of the next round that are trained already would else not count until this node is back.
            self._last = round_number + 1 if self._inner.is_ahead_of(round_number) else round_number
        return self._last

    async def _plan(self, epoch: int) -> Plan:
        """The plan of `epoch`, as soon as it is here. Raises Superseded where a later plan replaced it."""

        def known(run_view: RunView) -> Plan | None:
            if epoch not in run_view.plans and max(run_view.plans, default=0) > epoch:
                raise Superseded(f"plan {epoch} was replaced before this node heard of it")
            return run_view.plans.get(epoch)

        with self._services.figures.waits.on(Wait.PLAN):
            return await self._services.membership.until(known)

    async def _cancel_when_superseded(
        self, work: Awaitable[T], round_number: int, is_opening: bool = False
    ) -> T:
        """The result of `work`. Raises Superseded when the assignment does not count in the round any more.

        With `is_opening` the links are not open yet, so it also ends when the round is decided.
        """
        membership, peer = self._services.membership, self._services.identity.peer
        session = membership.run_view.session

        def superseded(run_view: RunView) -> Superseded | None:
            epoch = self.assignment.plan.epoch
            if run_view.session != session:
                return Superseded("this node has joined again")
            if is_opening and run_view.round_number > round_number:
                return Superseded(f"round {round_number} was decided before this replica began it")
            reserved = run_view.followers.get(peer)
            # After a break it follows, and ends the round, unless it is needed for other stages.
            ends_alone = self._broken and reserved and reserved.stages == self._anchors.stages
            if reserved and run_view.plans and not ends_alone:
                return Superseded(f"plan {epoch} no longer counts on this node")
            plan = run_view.plan_for(round_number)
            if plan is not None and plan.epoch > epoch and not self._goes_on_under(plan):
                return Superseded(f"plan {plan.epoch} replaces plan {epoch} in round {round_number}")
            return None

        return await cancel_when(membership.until(superseded), work)

    def _goes_on_under(self, plan: Plan) -> bool:
        """Whether the round that this member trains goes on under `plan`, which repairs replicas in it."""
        own, replica = self.assignment, plan.replica_of(self._services.identity.peer)
        is_own = replica is not None and replica.index == own.replica.index
        # A member of a broken chain waits for such a plan, or ends the round alone.
        return plan.goes_on_from(own.plan.epoch) and is_own and (replica == own.replica or bool(self._broken))

    async def _train_round(self, round_number: int) -> RoundOutcome:
        """One round: the rest of its inner phase, the exchange and the training beside it, the validation."""
        inner = self._inner
        if inner.round_number < round_number:
            # The others do not wait for a snapshot that does not come, and it may never come.
            preparing = self._anchors.prepare_links(round_number)
            await self._cancel_when_superseded(preparing, round_number, is_opening=True)
            await inner.begin(self.assignment, round_number)
            self._entered = round_number if inner.done else self._entered
        else:  # the overlap with the round before has begun it
            await inner.resume(self.assignment)
        await self._unless_broken(inner.train())
        if self._broken is not None:  # other stages may not have decided the round before
            await self._services.membership.until(lambda view: view.round_number >= round_number or None)
        while self._broken is not None and await self._is_repaired(round_number):
            await self._unless_broken(inner.train())
        is_alone = len(self.assignment.plan.replicas) == 1  # the round waits for peers then
        if self._broken is not None and (is_alone or not inner.done):
            raise self._broken  # a later payload has what was learned
        measured = await inner.end()
        outcome, measured = await self._exchange_and_train(round_number, measured)
        if self._broken is not None:
            return outcome
        self._chain.pipeline.drop_frames_before(round_number)
        validation_loss = await self._chain.pipeline.validate(round_number)
        await self._measure(
            replace(
                measured,
                payload_bytes=outcome.payload_bytes,
                payload_bytes_dense=4 * sum(self._anchors.stage_info.parameters.values()),
                progress_norm=outcome.progress_norm,
                error_norm=outcome.error_norm,
                agreements=outcome.agreements,
                nonfinite_step=measured.nonfinite_step or (0 if outcome.is_finite else measured.steps),
                validation_loss=validation_loss,
            )
        )
        return outcome

    async def _is_repaired(self, round_number: int) -> bool:
        """Whether the chain has broken, and goes on in this round with the peers that a new plan gives it.

        What this member has finished stays. A step that another member has finished, and this one has not, is
        over; it takes nothing of it. The round waits for this member as long as its last retreat has said: if
        no links are open then, it offers what it has.
        """
        now, until = asyncio.get_running_loop().time, 0.0
        while self._broken is not None and self._inner.done:
            done = self._inner.done
            seconds = await self._give_up(self.assignment, self._broken, done)
            until = max(until, now() + seconds)
            found = await self._repaired_assignment(round_number, until)
            if found is None or found.first_step(round_number) < done:
                return False
            log.info("%s", found.plan.reason)
            self.assignment = found
            try:
                async with asyncio.timeout_at(until):
                    await cancel_when(self._no_chain(round_number), self._chain.open(found, round_number))
            except TimeoutError:
                return False
            except Superseded:
                if self._repaired_now(round_number) is None:
                    raise
            except HetnodeError as error:
                if error.code not in UNLINKED:
                    raise
                self._broken = error
            else:
                self._inner.go_on(found, self._chain.pipeline)
                self._broken = None
        return self._broken is None

    async def _repaired_assignment(self, round_number: int, until: float) -> PeerAssignment | None:
        """The assignment under the next plan that repairs this replica in the round; None in vain."""
        if (found := self._repaired_now(round_number)) is not None:
            return found
        repaired = self._services.membership.until(lambda _: self._repaired_now(round_number))
        with suppress(TimeoutError), self._services.figures.waits.on(Wait.PLAN):
            async with asyncio.timeout_at(until):
                return await repaired
        return None

    def _repaired_now(self, round_number: int) -> PeerAssignment | None:
        """The assignment under the newest plan, if that repairs this replica, which has broken."""
        view, own = self._services.membership.run_view, self.assignment
        found = view.assignment_of(self._services.identity.peer, round_number)
        if found is None or found.replica == own.replica or view.round_number != round_number:
            return None
        return found if self._goes_on_under(found.plan) else None

    async def _no_chain(self, round_number: int) -> Superseded:
        """Wait until the links that are being opened are of no use, since another member is lost."""
        await self._services.membership.until(
            lambda view: view.round_number > round_number or self._repaired_now(round_number) or None
        )
        return Superseded(f"round {round_number} goes on without the links that were being opened")

    async def _exchange_and_train(
        self, round_number: int, measured: Measurement
    ) -> tuple[RoundOutcome, Measurement]:
        """Contribute to a round, and train at the same time.

        Adds `extra_steps` and `outer_seconds`, for which the regular steps had to wait, to `measured`.
        """
        clock = asyncio.get_running_loop().time
        began, gates = clock(), RoundGates(self._anchors.stages)
        share = min(1.0, measured.steps / self._spec.inner.steps)
        if round_number == self._entered and len(self.assignment.plan.replicas) > 1:
            share = 0.0  # a first payload of few steps, without error feedback, costs more than it brings
        contribution = self._exchange.contribute(self.assignment.plan, round_number, share, gates)
        contributing, beside = asyncio.create_task(contribution), (0.0, 0)
        try:
            if self._broken is None:
                training = self._train_beside(round_number, gates, contributing)
                training = cancel_when_failed(contributing, training)
                beside = await self._unless_broken(training) or beside
            if self._broken is not None:
                await cancel_when_failed(contributing, gates.proposed.wait())
                gates.trained.set()
                await asyncio.wait({contributing}, timeout=_OFFER_SECONDS)
                if not self._leaving.is_set():  # else its neighbours may have a plan without it, and be gone
                    await cancel_when_failed(contributing, self._give_up(self.assignment, self._broken, 0))
            outcome = await contributing
        finally:
            contributing.cancel()
            await asyncio.gather(contributing, return_exceptions=True)
        ahead, extra_steps = beside
        return outcome, replace(measured, extra_steps=extra_steps, outer_seconds=clock() - began - ahead)

    async def _unless_broken(self, training: Awaitable[T]) -> T | None:
        """The result of `training`; None where the chain has broken: its unfinished step is dropped then.

        A step that this member has finished has the gradients of whole microbatches, clipped by their global
        norm, whatever the others could still make of that step.
        """
        try:
            return await training
        except HetnodeError as error:
            if error.code not in _BREAKS:
                raise
            self._broken = error
            log.warning("the replica has broken, and its finished steps count: %s", error)
        await self._chain.pipeline.close()  # the members behind this one must not wait for it
        async with self._anchors.between_steps:
            await self._services.worker.call(Abandon())
        return None

    async def _train_beside(
        self, round_number: int, gates: RoundGates, contributing: asyncio.Task[RoundOutcome]
    ) -> tuple[float, int]:
        """Train the first steps of the next round, as many as overlap, under the present plan, which the
        decision of the round may change; then beyond H while the coordinator is away.

        Returns the seconds of the former, and the number of the latter.
        """
        steps = self._spec.outer.overlap if round_number < self._spec.rounds else 0
        await gates.proposed.wait()
        if steps:
            await self._services.worker.call(KeepTraining())
            await self._anchors.prepare_links(round_number + 1)
            await self._inner.begin(self.assignment, round_number + 1)
            await self._inner.train(ahead=steps)
        gates.trained.set()
        extra = await self._train_while_away(round_number, contributing)
        return self._inner.seconds if steps else 0.0, extra

    async def _train_while_away(self, round_number: int, contributing: asyncio.Task[RoundOutcome]) -> int:
        """Train beyond H, up to a bound, while the coordinator is away. Returns the number of steps.

        The first member decides for its replica. The progress counts in the next round.
        """
        membership, most = self._services.membership, EXTRA_STEPS
        first_extra = self._spec.inner.steps + 1  # the phase of step H has ended the regular steps
        steps = 0
        while True:
            may_train = self.assignment.is_first and steps < most
            while may_train and not contributing.done() and membership.away <= _AWAY_SECONDS:
                await asyncio.wait({contributing}, timeout=_POLL_SECONDS)
            wanted = may_train and not contributing.done()
            if not await self._chain.pipeline.phase(round_number, first_extra + steps, wanted):
                break
            if not steps:
                log.warning("the coordinator is away: training up to %d steps without it", most)
                await self._services.worker.call(KeepTraining())
            await self._inner.train_beyond(round_number, first_extra + steps)
            steps += 1
        if steps and not contributing.done():
            log.warning(
                "holding after %d steps without the coordinator: round %d is in doubt until it is back, and "
                "nothing is applied that it has not committed",
                *(steps, round_number),
            )
        return steps

    async def _measure(self, measured: Measurement) -> None:
        """Note and tell what was measured."""
        self._services.figures.measured(measured)
        await self._measurements.tell(measured)
        result = f"validation loss {measured.validation_loss:.4f}" if measured.complete else "done"
        log.info("round %d of %d: %s", measured.round_number, self._spec.rounds, result)

    async def _tell(self, measured: Measurement) -> None:
        """Tell the coordinator. A lost measurement does not stop the training."""
        try:
            await self._services.coordinator.measure(measured)
        except HetnodeError as error:
            if error.code not in (ErrorCode.COORDINATOR_UNREACHABLE, ErrorCode.BAD_REQUEST):
                raise
            log.warning("a measurement of round %d is lost: %s", measured.round_number, error)
