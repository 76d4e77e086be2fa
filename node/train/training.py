"""One node's training from its first place in the run to the last round: read :meth:`Training.run` top to
bottom.

A node follows the log of decisions until a plan gives it a seat, trains under that plan until it ends or
cannot go on, and follows again. Whatever happens to its replica, its links or the coordinator, this loop is
the one way back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from node import faults
from node.faults import Moment
from node.identity import Identity
from node.net.coordinator_client import CoordinatorClient
from node.net.directory import Directory
from node.net.hive.client import Hivemind
from node.net.ipc import Child
from node.net.link import Link, LinkLimits, Links
from node.net.link import Place as LinkPlace
from node.net.membership import Membership, Seat, Standing, jittered
from node.train.exchange import OuterExchange, RoundOutcome, run_is_over
from node.train.facts import Facts
from node.train.pipeline import Pipeline
from node.train.recovery import Recovery
from protocol.errors import ErrorCode, HetnodeError, first_error
from protocol.framing import frame_limit
from protocol.pb import hetnode_pb2 as pb
from protocol.samples import sample_range
from protocol.spec import RunSpec
from protocol.types import Dialer, PeerId, Place, Plan, StageRange

log = logging.getLogger(__name__)

_RETRY_SECONDS = 2.0
_AWAY_SECONDS = 2.0
_POLL_SECONDS = 0.5
_BROKEN = frozenset(
    (
        ErrorCode.NEIGHBOUR_LOST,
        ErrorCode.NEIGHBOUR_UNREACHABLE,
        ErrorCode.FRAME_CORRUPT,
        ErrorCode.FRAME_TOO_LARGE,
        ErrorCode.CERTIFICATE_REFUSED,
    )
)
"""This replica cannot go on as it is; this node can."""
_MENDABLE = _BROKEN | {
    ErrorCode.UNKNOWN_PEER,
    ErrorCode.SEAT_LOST,
    ErrorCode.ANCHOR_DIVERGED,
    ErrorCode.PAYLOAD_UNAVAILABLE,
    ErrorCode.STATE_UNAVAILABLE,
    ErrorCode.COORDINATOR_UNREACHABLE,
}
_AWAY = frozenset(
    (
        ErrorCode.COORDINATOR_UNREACHABLE,
        ErrorCode.UNKNOWN_PEER,
        ErrorCode.PAYLOAD_UNAVAILABLE,
        ErrorCode.STATE_UNAVAILABLE,
    )
)
"""Others are not there; after the end of the run they will not come back."""


@dataclass(frozen=True)
class Services:
    """What a joined node has at hand: its identity, its processes and its connections."""

    identity: Identity
    worker: Child
    hivemind: Hivemind
    coordinator: CoordinatorClient
    links: Links
    membership: Membership
    directory: Directory


@dataclass(frozen=True)
class LocalData:
    """Where this machine computes and finds what the spec names: None means as the spec says."""

    device: str
    source: str | None
    tokenizer: str | None


class Superseded(Exception):
    """The seat of this node is no longer in force: another plan is, or it has had to join again."""


class Training:
    """Trains this node's stages until the run's last round.

    Args:
        spec: the run.
        services: what the node has at hand.
        local: what this machine has its own way to.
        folder: of this node; checkpoints and committed payloads are kept below it.
    """

    def __init__(self, spec: RunSpec, services: Services, local: LocalData, folder: Path) -> None:
        self._spec, self._services, self._local = spec, services, local
        self._checkpoints, self._payloads = folder / "checkpoint", folder / "payloads"
        self._between_steps = asyncio.Lock()
        self._step_seconds = 0.0
        self._seat: Seat | None = None
        self._left_epoch = 0  # no seat of a plan up to this one counts any more
        # What is known once this node has its place.
        self._stages: StageRange
        self._facts: Facts
        self._exchange: OuterExchange
        self._recovery: Recovery
        self._ready = False

    async def run(self) -> Path:
        """Take a place, train all rounds, keep the checkpoint. Returns the checkpoint's folder.

        Raises HetnodeError for every failure that this node cannot mend; what was committed stays committed.
        """
        await self._take_place()
        trouble: BaseException | None = None
        while self._exchange.position < self._spec.rounds:
            session = self._services.membership.standing.session
            try:
                if trouble is not None:
                    await self._mend(trouble, session)
                    trouble = None
                if await self._follow_until_seated():
                    await self._train()
            except (Superseded, HetnodeError, BaseExceptionGroup) as error:
                trouble = first_error(error)
                if self._services.membership.standing.finished and _code_of(trouble) in _AWAY:
                    raise run_is_over() from None
                if not isinstance(trouble, Superseded) and _code_of(trouble) not in _MENDABLE:
                    raise
        return await self._keep(self._spec.rounds)

    async def keep_progress(self) -> None:
        """Write what a later start of this node goes on from; to be called when it has to leave midway."""
        if self._ready:
            await self._abandon()
        if self._ready and self._exchange.is_even:
            await self._keep(self._exchange.position)

    # How a seat is found

    async def _take_place(self) -> None:
        """Build the stages of this node's place and load their anchors."""
        spec, services = self._spec, self._services
        peer = services.identity.peer
        place = await services.membership.until(lambda standing: _place_in(standing, peer))
        self._stages = place.stages
        log.info("this node's place is replica-%d, %s", place.replica, _words(place.stages))
        body = {"spec": spec.canonical_json, "stages": [place.stages.first, place.stages.stop]}
        local = self._local
        reply = await services.worker.call(
            "build", {**body, "device": local.device, "source": local.source, "tokenizer": local.tokenizer}
        )
        self._facts = Facts.of_build(place.stages, reply.body)
        await services.hivemind.host_stages(
            self._facts.hosted_payload_bytes(place.stages),
            self._payloads,
            self._checkpoints,
            spec.recovery.keep_rounds,
        )
        await services.directory.take_stages(place.stages)
        self._exchange = OuterExchange(
            spec,
            place.stages,
            services.identity,
            services.worker,
            services.hivemind,
            services.coordinator,
            services.membership,
            self._facts,
            self._between_steps,
        )
        self._recovery = Recovery(
            spec,
            peer,
            services.worker,
            services.hivemind,
            services.coordinator,
            services.membership,
            self._exchange,
            self._facts,
            self._checkpoints,
        )
        await self._recovery.begin()
        self._ready = True

    async def _follow_until_seated(self) -> bool:
        """Apply one decision after the other until a plan gives this node a seat in the next round.

        Returns whether it has one: not where the run is over.
        """
        membership, exchange = self._services.membership, self._exchange
        await self._recovery.catch_up()
        attested = -1
        while exchange.position < self._spec.rounds:
            next_round = exchange.position + 1
            at_tip = exchange.position >= membership.standing.round - 1
            if at_tip and attested < exchange.position and self._has_its_place:
                await exchange.attest_all()
                attested = exchange.position
            membership.progress = (next_round, 0)
            await faults.reach(Moment.FOLLOWING, round=next_round)
            self._seat = await self._seat_or_decision(next_round)
            if self._seat is not None:
                return True
            await exchange.follow(next_round)
            await self._keep_if_due(next_round)
        return False

    @property
    def _has_its_place(self) -> bool:
        place = self._services.membership.standing.place_of(self._services.identity.peer)
        return place is not None and place.stages == self._stages

    async def _seat_or_decision(self, round_: int) -> Seat | None:
        """This node's seat in `round_` as soon as it has one; None as soon as the round is decided."""
        peer = self._services.identity.peer

        def seat(standing: Standing) -> Seat | None:
            if standing.round > round_:
                return None  # it is decided already
            there = standing.place_of(peer)
            if there is not None and there.stages != self._stages:
                raise HetnodeError(
                    ErrorCode.RUN_FULL,
                    f"This node has stages {self._stages} and is now to have {there.stages}.",
                    "Start it again: it then takes its new place.",
                )
            found = standing.seat_of(peer, round_)
            return found if found is not None and found.plan.epoch > self._left_epoch else None

        seated = asyncio.create_task(self._services.membership.until(seat))
        decided = asyncio.create_task(self._exchange.decision(self._stages.first, round_))
        try:
            await asyncio.wait({seated, decided}, return_when=asyncio.FIRST_COMPLETED)
            if decided.done():
                decided.result()
                return None
            return seated.result()
        finally:
            for task in (seated, decided):
                task.cancel()
            await asyncio.gather(seated, decided, return_exceptions=True)

    # How a seat is lost

    async def _mend(self, trouble: BaseException, session: int) -> None:
        """Do what lets this node follow again after `trouble`, one of _MENDABLE or a Superseded."""
        log.warning("%s", trouble)
        await self._abandon()
        await self._give_up(trouble)
        match _code_of(trouble):
            case ErrorCode.UNKNOWN_PEER:
                await self._services.membership.rejoin(session)
            case ErrorCode.ANCHOR_DIVERGED:
                log.warning("loading the anchor of the others")
                await self._recovery.start_over()
            case ErrorCode.PAYLOAD_UNAVAILABLE:
                if not await self._recovery.jump_forward():
                    await asyncio.sleep(jittered(_RETRY_SECONDS))
            case ErrorCode.STATE_UNAVAILABLE | ErrorCode.COORDINATOR_UNREACHABLE:
                await asyncio.sleep(jittered(_RETRY_SECONDS))
            case _:
                pass

    async def _abandon(self) -> None:
        """Nothing of an inner step that was not finished counts; what is being applied is applied first."""
        async with self._between_steps:
            await self._services.worker.call("abandon", {})

    async def _give_up(self, reason: BaseException) -> None:
        """Leave the seat, and let nobody wait for this node's replica as it is.

        A seat that the coordinator still counted would be waited for in every round; so this goes on until
        the coordinator knows, without which this node could not follow either.
        """
        if self._seat is None:
            return
        epoch = self._seat.plan.epoch
        self._left_epoch = max(self._left_epoch, epoch)
        code = _code_of(reason)
        words = str(reason) if code is None else code.label
        while True:
            try:
                await self._services.coordinator.retreat(epoch, words)
                break
            except HetnodeError as error:
                if error.code is not ErrorCode.COORDINATOR_UNREACHABLE:
                    break  # whom it has taken for lost, it does not wait for
            await asyncio.sleep(jittered(_RETRY_SECONDS))
        self._seat = None

    # Training under one plan

    async def _train(self) -> None:
        """Train from the next round on, until the run is over or a plan changes this replica."""
        spec, services, seat = self._spec, self._services, self._seat
        assert seat is not None, "only who is seated trains"
        first = self._exchange.position + 1
        log.info(
            "%s: %s, %s, from round %d",
            *(seat.plan.reason, seat.replica.name, _words(self._stages), first),
        )
        async with AsyncExitStack() as stack:
            opening = self._open_links(seat, first, stack)
            upstream, downstream = await self._unless_superseded(opening, seat, first, opening=True)
            links = seat.replica.links
            k_upstream = None if seat.is_first else links[seat.position - 1].k
            k_downstream = None if seat.is_last else links[seat.position].k
            await services.worker.call("connect", {"k_upstream": k_upstream, "k_downstream": k_downstream})
            pipeline = Pipeline(
                spec, seat.plan, seat.replica, seat.position, services.worker, upstream, downstream
            )
            if first == 1:
                await self._measure(seat, 0, {"validation_loss": await pipeline.validate(0)})
            for round_ in range(first, spec.rounds + 1):
                outcome = await self._unless_superseded(self._round(seat, pipeline, round_), seat, round_)
                await self._keep_if_due(round_)
                if round_ == spec.rounds:
                    break
                plan = await self._unless_superseded(self._plan(outcome.next_epoch), seat, round_)
                if plan.epoch != seat.plan.epoch:
                    log.info("%s", plan.reason)
                replica = plan.replica_of(services.identity.peer)
                if replica is None or (replica.members, replica.links) != (
                    seat.replica.members,
                    seat.replica.links,
                ):
                    break
                self._seat = seat = Seat(plan, replica, seat.position)
                pipeline.adopt(plan, replica)
            await pipeline.part()
        self._seat = None

    async def _plan(self, epoch: int) -> Plan:
        def known(standing: Standing) -> Plan | None:
            if epoch not in standing.plans and max(standing.plans, default=0) > epoch:
                raise Superseded(f"plan {epoch} was replaced before this node heard of it")
            return standing.plans.get(epoch)

        return await self._services.membership.until(known)

    async def _unless_superseded(
        self, work: Awaitable[Any], seat: Seat, round_: int, opening: bool = False
    ) -> Any:
        """The result of `work`, which is cancelled where `seat` does not count in `round_` any more.

        Args:
            opening: nothing was trained yet, so that it makes no sense either once the round is decided.

        Raises Superseded then.
        """
        membership, peer = self._services.membership, self._services.identity.peer
        session = membership.standing.session

        def over(standing: Standing) -> str | None:
            if standing.session != session:
                return "this node has joined again"
            if opening and standing.round > round_:
                return f"round {round_} was decided before this replica began it"
            if peer in standing.followers and standing.plans:
                return f"plan {seat.plan.epoch} no longer counts on this node"
            plan = standing.plan_for(round_)
            if plan is not None and plan.epoch > seat.plan.epoch:
                return f"plan {plan.epoch} has taken the place of plan {seat.plan.epoch} in round {round_}"
            return None

        working = asyncio.ensure_future(work)
        watching = asyncio.create_task(membership.until(over))
        try:
            await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            raise Superseded(watching.result())
        finally:
            for task in (working, watching):
                task.cancel()
            await asyncio.gather(working, watching, return_exceptions=True)

    async def _round(self, seat: Seat, pipeline: Pipeline, round_: int) -> RoundOutcome:
        """One round: inner phase, exchange, validation."""
        clock = asyncio.get_running_loop().time
        measured = await self._inner_phase(seat, round_, pipeline)
        began = clock()
        share = min(1.0, measured["steps"] / self._spec.inner.steps)
        contributing = asyncio.create_task(self._exchange.contribute(seat.plan, round_, share))
        try:
            measured["extra_steps"] = await self._go_on_alone(seat, round_, pipeline, contributing)
            outcome = await contributing
        finally:
            contributing.cancel()
            await asyncio.gather(contributing, return_exceptions=True)
        measured["outer_seconds"] = clock() - began
        measured["payload_bytes"] = outcome.payload_bytes
        measured["payload_bytes_dense"] = 4 * sum(self._facts.parameters.values())
        await pipeline.forget_before(round_)
        measured["validation_loss"] = await pipeline.validate(round_)
        await self._measure(seat, round_, measured)
        return outcome

    async def _inner_phase(self, seat: Seat, round_: int, pipeline: Pipeline) -> dict[str, Any]:
        """H inner steps, or as many as the round has time for. Returns what was measured."""
        spec, worker = self._spec, self._services.worker
        clock = asyncio.get_running_loop().time
        samples = sample_range(seat.plan, spec, round_, seat.replica.index)
        await worker.call("begin_round", {"round": round_, "samples": [samples.start, samples.stop]})
        began, sent_before = clock(), pipeline.bytes_sent
        for step in count():
            self._services.membership.progress = (round_, step)
            await faults.reach(Moment.INNER_STEP, round=round_)
            if not await pipeline.phase(round_, step, self._has_time(round_, step)):
                break
            step_began = clock()
            await self._step(pipeline, round_, step)
            self._step_seconds = clock() - step_began
        result = (await worker.call("end_inner_phase", {})).body
        if result["skipped_steps"]:
            log.warning(
                "round %d: %d steps had gradients that are not finite", round_, result["skipped_steps"]
            )
        if result["steps"] < spec.inner.steps:
            log.info("round %d: %d of %d steps", round_, result["steps"], spec.inner.steps)
        return {
            "train_loss": result["loss"],
            "tokens": result["tokens"],
            "steps": result["steps"],
            "gradient_norm": result["gradient_norm"],
            "inner_seconds": clock() - began,
            "link_bytes_sent": pipeline.bytes_sent - sent_before,
            "link_bytes_dense": pipeline.dense_bytes_per_round,
        }

    async def _step(self, pipeline: Pipeline, round_: int, step: int) -> None:
        async with self._between_steps:
            await pipeline.inner_step(round_, step)

    def _has_time(self, round_: int, step: int) -> bool:
        """Whether this replica should train one more step of `round_` before it offers its payloads."""
        if step >= self._spec.inner.steps:
            return False
        closes = self._services.membership.closes_in(round_)
        # One step's time more, because offering takes some, too.
        return closes is None or closes > 2 * self._step_seconds

    async def _go_on_alone(
        self, seat: Seat, round_: int, pipeline: Pipeline, contributing: asyncio.Task[RoundOutcome]
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
            while seat.is_first and not contributing.done() and steps < most:
                wanted = membership.away > _AWAY_SECONDS
                if wanted:
                    break
                await asyncio.wait({contributing}, timeout=_POLL_SECONDS)
            phase = asyncio.create_task(pipeline.phase(round_, first_extra + steps, wanted))
            try:
                await asyncio.wait({phase, contributing}, return_when=asyncio.FIRST_COMPLETED)
                if contributing.done() and contributing.exception() is not None:
                    break
                if not await phase:
                    break
            finally:
                phase.cancel()
            if not steps:
                log.warning("the coordinator is away: training up to %d steps without it", most)
                await self._services.worker.call("keep_training", {})
            await self._step(pipeline, round_, first_extra + steps)
            steps += 1
        if steps and not contributing.done():
            log.warning(
                "holding after %d steps without the coordinator: round %d is in doubt until it is back, and "
                "nothing is applied that it has not committed",
                *(steps, round_),
            )
        return steps

    # What is kept

    async def _keep_if_due(self, round_: int) -> None:
        """A disk that is full costs a checkpoint, not the run."""
        every = self._spec.recovery.checkpoint_every
        # Rounds of long ago that are followed in a hurry need no checkpoint of their own.
        is_old = round_ <= self._services.membership.standing.round - 2 * every
        if round_ % every or is_old or not self._exchange.is_even:
            return
        try:
            await self._keep(round_)
        except HetnodeError as error:
            if error.code is not ErrorCode.DISK_FULL:
                raise
            log.error("training goes on without a checkpoint of round %d: %s", round_, error)

    async def _keep(self, round_: int) -> Path:
        """Write a checkpoint after `round_`, in which everything here is. Returns its folder."""
        folder = self._checkpoints / f"round-{round_:06d}"
        async with self._between_steps:
            await self._services.worker.call("write_checkpoint", {"folder": str(folder), "round": round_})
        return folder

    async def _measure(self, seat: Seat, round_: int, values: Mapping[str, Any]) -> None:
        measurement = pb.Measurement(
            round=round_,
            replica=seat.replica.index,
            position=seat.position,
            complete=seat.is_last,
            **values,
        )
        try:
            await self._services.coordinator.measure(measurement)
        except HetnodeError as error:
            if error.code not in (ErrorCode.COORDINATOR_UNREACHABLE, ErrorCode.BAD_REQUEST):
                raise
            log.warning("a measurement of round %d is lost: %s", round_, error)  # no reason to stop training
        learned = f"validation loss {values['validation_loss']:.4f}" if seat.is_last else "done"
        log.info("round %d of %d: %s", round_, self._spec.rounds, learned)

    async def _open_links(
        self, seat: Seat, round_: int, stack: AsyncExitStack
    ) -> tuple[Link | None, Link | None]:
        """Open the links to both neighbours at the same time; `stack` closes them."""
        spec, members = self._spec, seat.replica.members
        endpoints = await self._services.directory.endpoints() if len(members) > 1 else {}
        # The first member may have a corpus to tokenize before it comes to its links.
        seconds = spec.timing.link + spec.timing.match_window
        limits = LinkLimits(frame_limit(spec), 2 * spec.inner.microbatches + 4)

        def place(position: int) -> LinkPlace:
            peer = members[position].peer
            return LinkPlace(
                spec.run_id, spec.hash, peer, seat.replica.index, position, seat.plan.epoch, round_
            )

        async def connect(other: int) -> Link | None:
            if not 0 <= other < len(members):
                return None
            here, there = place(seat.position), place(other)
            upstream_dials = seat.replica.links[min(seat.position, other)].dialer is Dialer.UPSTREAM
            if upstream_dials == (seat.position < other):
                # The plan's endpoint is that of the member's last join; a record may be of the one before.
                endpoint = members[other].endpoint or endpoints.get(there.peer, "")
                link = await self._services.links.dial(endpoint, here, there, limits, seconds)
            else:
                link = await self._services.links.accept(here, there, limits, seconds)
            stack.push_async_callback(link.close)
            ends = asyncio.create_task(self._close_when_banned(link), name=f"bans-{other}")
            stack.callback(ends.cancel)
            log.info("link to position %d of %s is open", other, seat.replica.name)
            return link

        upstream, downstream = await asyncio.gather(connect(seat.position - 1), connect(seat.position + 1))
        return upstream, downstream

    async def _close_when_banned(self, link: Link) -> None:
        await link.close(await self._services.membership.banned(link.neighbour.peer))


def _words(stages: StageRange) -> str:
    return f"stage{'s' * (len(stages) > 1)} {stages}"


def _code_of(error: BaseException) -> ErrorCode | None:
    return error.code if isinstance(error, HetnodeError) else None


def _place_in(standing: Standing, peer: PeerId) -> Place | None:
    """The place of `peer`, once it has one. Raises RUN_STARTED where the run ends before."""
    if standing.finished:
        raise run_is_over()
    return standing.place_of(peer)
