"""A member trains under one plan: links, inner phases, exchanges and validations, round after round.

Read :meth:`Seated.run` top to bottom. It ends with the run, with a plan that changes this replica, or when
this node is to leave; whatever else goes wrong is raised, and nothing of an unfinished inner step counts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from node.ipc.worker_calls import Connect, KeepTraining, StageInfo
from node.net.link import Link, LinkEndpoint, LinkLimits
from node.net.membership import Assignment, RunView
from node.train.inner_phase import InnerLoop
from node.train.outer_exchange import OuterExchange, RoundOutcome
from node.train.overlap import Overlap
from node.train.pipeline import Pipeline
from node.train.services import Services
from node.train.waiting import unless, unless_failed
from protocol.errors import ErrorCode, HetnodeError
from protocol.spec.run import RunSpec
from protocol.status import Measurement
from protocol.types import Dialer, Plan, Replica
from protocol.wire.framing import frame_limit

log = logging.getLogger(__name__)
T = TypeVar("T")

_AWAY_SECONDS = 2.0
_POLL_SECONDS = 0.5
_PARTING_SECONDS = 5.0


class Superseded(Exception):
    """The seat of this node is no longer in force: another plan is, or it has had to join again."""


class ReplicaSession:
    """One seat of this node, and those of later plans that keep its replica.

    Args:
        seat: to train in, from the round after the exchange's position on.
        between_steps: held while an inner step computes, and by others while parameters change.
        leaving: set when this node is to leave: it then goes on to the end of the round in which it trains.
        keep: called after every round, to write a checkpoint where one is due.

    Attributes:
        seat: under the newest plan that has kept the replica.
    """

    def __init__(
        self,
        spec: RunSpec,
        assignment: Assignment,
        services: Services,
        exchange: OuterExchange,
        stage_info: StageInfo,
        between_steps: asyncio.Lock,
        leaving: asyncio.Event,
        keep: Callable[[int], Awaitable[None]],
    ) -> None:
        self.assignment = assignment
        self._spec, self._services, self._exchange, self._stage_info = spec, services, exchange, stage_info
        self._between_steps, self._leaving, self._keep = between_steps, leaving, keep
        self._last: int | None = None

    async def run(self) -> None:
        """Train until the run is over, a plan changes this replica, or this node is to leave.

        Raises Superseded, or HetnodeError (alone or in an ExceptionGroup) where the replica cannot go on.
        """
        spec, assignment, peer = self._spec, self.assignment, self._services.identity.peer
        first = self._exchange.position + 1
        async with AsyncExitStack() as stack:
            opening = self._open_links(first, stack)
            upstream, downstream = await self._unless_superseded(opening, first, opening=True)
            await self._connect()
            worker = self._services.worker
            pipeline = Pipeline(
                spec, assignment.plan, assignment.replica, assignment.position, worker, upstream, downstream
            )
            if first == 1:
                await self._measure(0, {"validation_loss": await pipeline.validate(0)})
            inner = InnerLoop(spec, self._services, pipeline, self._between_steps)
            for round_number in range(first, spec.rounds + 1):
                outcome = await self._unless_superseded(
                    self._round(pipeline, inner, round_number), round_number
                )
                await self._keep(round_number)
                if round_number == spec.rounds:
                    break
                plan = await self._unless_superseded(self._plan(outcome.next_epoch), round_number)
                if plan.epoch != self.assignment.plan.epoch:
                    log.info("%s", plan.reason)
                replica = plan.replica_of(peer)
                if replica is None or not _is_same_chain(replica, self.assignment.replica):
                    break
                if self._leaving.is_set() and round_number >= self._last_round(inner, round_number):
                    # The others were told too late to plan without it, and will find its links closed. What
                    # they validate with until then is still under way.
                    await pipeline.part(_PARTING_SECONDS)
                    return
                await self._adopt(Assignment(plan, replica, assignment.position), pipeline)
            await pipeline.part()

    def _last_round(self, inner: InnerLoop, round_number: int) -> int:
        """The round after which this node leaves, although it is seated in the next: that in which it trains.

        What it has trained ahead of `round_` would otherwise be of no use to anybody before it comes back.
        """
        if self._last is None:
            self._last = round_number + 1 if inner.is_ahead_of(round_number) else round_number
        return self._last

    async def _connect(self) -> None:
        """Tell the worker how wide both links are."""
        assignment = self.assignment
        links = assignment.replica.links
        k_upstream = None if assignment.is_first else links[assignment.position - 1].k
        k_downstream = None if assignment.is_last else links[assignment.position].k
        await self._services.worker.call(Connect(k_upstream, k_downstream))

    async def _adopt(self, assignment: Assignment, pipeline: Pipeline) -> None:
        """Go on in the same chain under the next plan, whose links may be wider or narrower.

        Both ends do so between the same two rounds, when no frame is under way, so the link stays open.
        """
        has_other_links = assignment.replica.links != self.assignment.replica.links
        self.assignment = assignment
        if has_other_links:
            await self._connect()
        pipeline.adopt(assignment.plan, assignment.replica)

    async def _plan(self, epoch: int) -> Plan:
        def known(run_view: RunView) -> Plan | None:
            if epoch not in run_view.plans and max(run_view.plans, default=0) > epoch:
                raise Superseded(f"plan {epoch} was replaced before this node heard of it")
            return run_view.plans.get(epoch)

        return await self._services.membership.until(known)

    async def _unless_superseded(self, work: Awaitable[T], round_number: int, opening: bool = False) -> T:
        """The result of `work`, which is cancelled where the seat does not count in `round_` any more.

        Args:
            opening: nothing was trained yet, so that it makes no sense either once the round is decided.

        Raises Superseded then.
        """
        membership, peer, epoch = (
            self._services.membership,
            self._services.identity.peer,
            self.assignment.plan.epoch,
        )
        session = membership.run_view.session

        def over(run_view: RunView) -> Superseded | None:
            if run_view.session != session:
                return Superseded("this node has joined again")
            if opening and run_view.round_number > round_number:
                return Superseded(f"round {round_number} was decided before this replica began it")
            if peer in run_view.followers and run_view.plans:
                return Superseded(f"plan {epoch} no longer counts on this node")
            plan = run_view.plan_for(round_number)
            if plan is not None and plan.epoch > epoch:
                return Superseded(
                    f"plan {plan.epoch} has taken the place of plan {epoch} in round {round_number}"
                )
            return None

        return await unless(membership.until(over), work)

    async def _round(self, pipeline: Pipeline, inner: InnerLoop, round_number: int) -> RoundOutcome:
        """One round: what is left of its inner phase, the exchange and what is trained beside it, validation.

        The validation is of what this replica has by then: the anchor, and what it has learned since of its
        own.
        """
        if inner.round_number < round_number:
            await inner.begin(self.assignment, round_number)
        else:
            await inner.go_on(self.assignment)
        await inner.train()
        measured = await inner.end()
        outcome = await self._exchanged(pipeline, inner, round_number, measured)
        measured["payload_bytes"] = outcome.payload_bytes
        measured["payload_bytes_dense"] = 4 * sum(self._stage_info.parameters.values())
        await pipeline.forget_before(round_number)
        measured["validation_loss"] = await pipeline.validate(round_number)
        await self._measure(round_number, measured)
        return outcome

    async def _exchanged(
        self, pipeline: Pipeline, inner: InnerLoop, round_number: int, measured: dict[str, Any]
    ) -> RoundOutcome:
        """Contribute to `round_`, and train on meanwhile.

        `measured` is the inner phase, and gets what this one took: `outer_seconds` in which the regular steps
        had to wait for it.
        """
        clock = asyncio.get_running_loop().time
        began, overlap = clock(), Overlap(self._exchange.stages)
        share = min(1.0, measured["steps"] / self._spec.inner.steps)
        contribution = self._exchange.contribute(self.assignment.plan, round_number, share, overlap)
        contributing = asyncio.create_task(contribution)
        try:
            ahead = await unless_failed(contributing, self._train_ahead(inner, round_number, overlap))
            alone = self._go_on_alone(pipeline, inner, round_number, contributing)
            measured["extra_steps"] = await unless_failed(contributing, alone)
            outcome = await contributing
        except HetnodeError:
            if self._leaving.is_set() and not overlap.is_over:
                # Its neighbours are planned without it and may have gone. Its round can still be finished.
                overlap.has_trained()
                await contributing
            raise
        finally:
            contributing.cancel()
            await asyncio.gather(contributing, return_exceptions=True)
        measured["outer_seconds"] = clock() - began - ahead
        return outcome

    async def _train_ahead(self, inner: InnerLoop, round_number: int, overlap: Overlap) -> float:
        """The first steps of the next round, as many as are to overlap. Returns their seconds.

        The decision of `round_` is applied just after them, on all replicas. It may change the plan; they are
        trained under the present one.
        """
        steps = self._spec.outer.overlap if round_number < self._spec.rounds else 0
        await overlap.until_proposed()
        if steps:
            await self._services.worker.call(KeepTraining())
            await inner.begin(self.assignment, round_number + 1)
            await inner.train_ahead(steps)
        overlap.has_trained()
        return inner.seconds if steps else 0.0

    async def _go_on_alone(
        self,
        pipeline: Pipeline,
        inner: InnerLoop,
        round_number: int,
        contributing: asyncio.Task[RoundOutcome],
    ) -> int:
        """Train beyond H, up to a bound, while the coordinator is away. Returns the number of steps.

        The first member decides for its replica. What is learned counts in the next round.
        """
        membership, most = self._services.membership, self._spec.recovery.extra_steps
        first_extra = (
            self._spec.inner.steps + 1
        )  # the phase of step H has said that the regular ones are over
        steps = 0
        while True:
            wanted = False
            while self.assignment.is_first and not contributing.done() and steps < most:
                wanted = membership.away > _AWAY_SECONDS
                if wanted:
                    break
                await asyncio.wait({contributing}, timeout=_POLL_SECONDS)
            if not await pipeline.phase(round_number, first_extra + steps, wanted):
                break
            if not steps:
                log.warning("the coordinator is away: training up to %d steps without it", most)
                await self._services.worker.call(KeepTraining())
            await inner.train_beyond(round_number, first_extra + steps)
            steps += 1
        if steps and not contributing.done():
            log.warning(
                "holding after %d steps without the coordinator: round %d is in doubt until it is back, and "
                "nothing is applied that it has not committed",
                *(steps, round_number),
            )
        return steps

    async def _measure(self, round_number: int, values: Mapping[str, Any]) -> None:
        assignment = self.assignment
        measurement = Measurement(
            peer=assignment.replica.members[assignment.position].peer,
            round_number=round_number,
            replica=assignment.replica.index,
            position=assignment.position,
            complete=self.assignment.is_last,
            **values,
        )
        try:
            await self._services.coordinator.measure(measurement)
        except HetnodeError as error:
            if error.code not in (ErrorCode.COORDINATOR_UNREACHABLE, ErrorCode.BAD_REQUEST):
                raise
            log.warning(
                "a measurement of round %d is lost: %s", round_number, error
            )  # no reason to stop training
        learned = f"validation loss {values['validation_loss']:.4f}" if self.assignment.is_last else "done"
        log.info("round %d of %d: %s", round_number, self._spec.rounds, learned)

    async def _open_links(self, round_number: int, stack: AsyncExitStack) -> tuple[Link | None, Link | None]:
        """Open the links to both neighbours at the same time; `stack` closes them."""
        spec, assignment = self._spec, self.assignment
        members = assignment.replica.members
        endpoints = await self._services.directory.endpoints() if len(members) > 1 else {}
        # The first member may have a corpus to tokenize before it comes to its links.
        seconds = spec.timing.link + spec.timing.match_window
        limits = LinkLimits(frame_limit(spec), 2 * spec.inner.microbatches + 4)

        def place(position: int) -> LinkEndpoint:
            peer = members[position].peer
            return LinkEndpoint(
                spec.run_id,
                spec.hash,
                peer,
                assignment.replica.index,
                position,
                assignment.plan.epoch,
                round_number,
            )

        async def connect(other: int) -> Link | None:
            if not 0 <= other < len(members):
                return None
            here, there = place(assignment.position), place(other)
            upstream_dials = (
                assignment.replica.links[min(assignment.position, other)].dialer is Dialer.UPSTREAM
            )
            if upstream_dials == (assignment.position < other):
                # The plan's endpoint is that of the member's last join; a record may be of the one before.
                endpoint = members[other].endpoint or endpoints.get(there.peer, "")
                link = await self._services.links.dial(endpoint, here, there, limits, seconds)
            else:
                link = await self._services.links.accept(here, there, limits, seconds)
            stack.push_async_callback(link.close)
            ends = asyncio.create_task(self._close_when_banned(link), name=f"bans-{other}")
            stack.callback(ends.cancel)
            log.info("link to position %d of %s is open", other, assignment.replica.name)
            return link

        upstream, downstream = await asyncio.gather(
            connect(assignment.position - 1), connect(assignment.position + 1)
        )
        return upstream, downstream

    async def _close_when_banned(self, link: Link) -> None:
        await link.close(await self._services.membership.banned(link.neighbour.peer))


def _is_same_chain(one: Replica, other: Replica) -> bool:
    """Whether the same members stand in the same order and dial alike: their links can stay open."""
    dialers = [[link.dialer for link in replica.links] for replica in (one, other)]
    return one.members == other.members and dialers[0] == dialers[1]
