"""One node's training from its first place in the run to the last round: read :meth:`Training.run` top to
bottom.

A node follows the log of decisions until a plan gives it a seat, trains under that plan until it ends or
cannot go on, and follows again. Whatever happens to its replica, its links or the coordinator, this loop is
the one way back.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from enum import Enum
from pathlib import Path

from node.checkpoint.layout import round_folder
from node.folder import keep_only_stages
from node.ipc.worker_calls import Abandon, Build, StageInfo, WriteCheckpoint
from node.net.membership import Assignment, RunView, jittered
from node.train.outer_exchange import OuterExchange, run_is_over
from node.train.recovery import Recovery
from node.train.replica_session import ReplicaSession, Superseded
from node.train.services import LocalData, Services
from node.train.waiting import AskedToLeave, unless_asked
from protocol.errors import ErrorCode, HetnodeError, first_error
from protocol.spec.run import RunSpec
from protocol.types import PeerId, ReservedAssignment, StageRange

log = logging.getLogger(__name__)

_RETRY_SECONDS = 2.0
_NEWS_SECONDS = 10.0
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


class End(Enum):
    """How a node's training has ended: with the run, for other stages elsewhere, or as it was asked to."""

    FINISHED = "finished"
    MOVED = "moved"
    DRAINED = "drained"


class _Moved(Exception):
    """This node's place now has other stages than those that it has built."""


class NodeLoop:
    """Trains the stages of this node's place until the run's last round.

    Args:
        spec: the run.
        services: what the node has at hand.
        local: what this machine has its own way to.
        folder: of this node; checkpoints and committed payloads are kept below it.
        leaving: set when this node is to leave: at once, or at the end of the round in which it trains.
    """

    def __init__(
        self, spec: RunSpec, services: Services, local: LocalData, folder: Path, leaving: asyncio.Event
    ) -> None:
        self._spec, self._services, self._local = spec, services, local
        self._folder, self._leaving = folder, leaving
        self._checkpoints, self._payloads = folder / "checkpoint", folder / "payloads"
        self._kept = self._checkpoints
        self._between_steps = asyncio.Lock()
        self._assignment: Assignment | None = None
        self._left_epoch = 0  # no seat of a plan up to this one counts any more
        # What is known once this node has its place.
        self._stages: StageRange
        self._stage_info: StageInfo
        self._exchange: OuterExchange
        self._recovery: Recovery
        self._ready = False

    async def run(self) -> End:
        """Take a place and train, and keep the checkpoint of the last round where the run ends first.

        Raises HetnodeError for every failure that this node cannot mend; what was committed stays committed.
        """
        try:
            await unless_asked(self._leaving, self._take_place())
            await self._train_all_rounds()
        except _Moved as moved:
            log.info("%s", moved)
            return End.MOVED
        except AskedToLeave:
            return End.DRAINED
        await self._keep(self._spec.rounds)
        return End.FINISHED

    async def _train_all_rounds(self) -> None:
        trouble: BaseException | None = None
        while self._exchange.position < self._spec.rounds:
            session = self._services.membership.run_view.session
            try:
                if trouble is not None:
                    await unless_asked(self._leaving, self._mend(trouble, session))
                    trouble = None
                if await unless_asked(self._leaving, self._follow_until_seated()):
                    await self._train()
            except (Superseded, HetnodeError, BaseExceptionGroup) as error:
                trouble = first_error(error)
                self._check_place()
                if _code_of(trouble) is ErrorCode.BAD_REQUEST:
                    await self._hear_of_move()
                if self._services.membership.run_view.finished and _code_of(trouble) in _AWAY:
                    raise run_is_over() from None
                if not isinstance(trouble, Superseded) and _code_of(trouble) not in _MENDABLE:
                    raise

    @property
    def kept(self) -> Path:
        """The folder of the newest checkpoint that was written, or of those of before."""
        return self._kept

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
        place = await services.membership.until(lambda run_view: _place_in(run_view, peer))
        self._stages = place.stages
        keep_only_stages(self._folder, place.stages)
        log.info("this node's place is replica-%d, %s", place.replica, _words(place.stages))
        local = self._local
        self._stage_info = await services.worker.call(
            Build(
                spec,
                place.stages,
                local.compute,
                local.source,
                local.tokenizer,
                local.initial,
                local.search_paths,
            )
        )
        await services.transport.host_stages(
            {stage: self._stage_info.payload_bytes[stage] for stage in place.stages},
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
            services.transport,
            services.coordinator,
            services.membership,
            self._stage_info,
            self._between_steps,
        )
        self._recovery = Recovery(
            spec,
            peer,
            services.worker,
            services.transport,
            services.coordinator,
            services.membership,
            self._exchange,
            self._stage_info,
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
            at_tip = exchange.position >= membership.run_view.round_number - 1
            if at_tip and attested < exchange.position and self._has_its_place:
                await exchange.attest_all()
                attested = exchange.position
            membership.progress = (next_round, 0)
            self._assignment = await self._seat_or_decision(next_round)
            if self._assignment is not None:
                return True
            await exchange.follow(next_round)
            await self._keep_if_due(next_round)
        return False

    @property
    def _has_its_place(self) -> bool:
        place = self._services.membership.run_view.reservation_of(self._services.identity.peer)
        return place is not None and place.stages == self._stages

    def _check_place(self) -> None:
        """Raises _Moved where this node is to have other stages."""
        place = self._services.membership.run_view.reservation_of(self._services.identity.peer)
        if place is not None and place.stages != self._stages:
            raise _Moved(
                f"this node moves from {_words(self._stages)} to {_words(place.stages)} of "
                f"replica-{place.replica}: its processes start anew"
            )

    async def _hear_of_move(self) -> None:
        """Who is moved is refused what was usual at its former place, perhaps before it hears of the move.

        Raises _Moved where the news of it come.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(_NEWS_SECONDS):
                await self._services.membership.until(lambda _: self._check_place())

    async def _seat_or_decision(self, round_number: int) -> Assignment | None:
        """This node's seat in `round_` as soon as it has one; None as soon as the round is decided."""
        peer = self._services.identity.peer

        def assignment(run_view: RunView) -> Assignment | None:
            if run_view.round_number > round_number:
                return None  # it is decided already
            self._check_place()
            found = run_view.assignment_of(peer, round_number)
            return found if found is not None and found.plan.epoch > self._left_epoch else None

        seated = asyncio.create_task(self._services.membership.until(assignment))
        decided = asyncio.create_task(self._exchange.decision(self._stages.first, round_number))
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
            await self._services.worker.call(Abandon())

    async def _give_up(self, reason: BaseException) -> None:
        """Leave the seat, and let nobody wait for this node's replica as it is.

        A seat that the coordinator still counted would be waited for in every round; so this goes on until
        the coordinator knows, without which this node could not follow either.
        """
        if self._assignment is None:
            return
        epoch = self._assignment.plan.epoch
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
        self._assignment = None

    async def _train(self) -> None:
        """Train in this node's seat until it is over."""
        assert self._assignment is not None, "only who is seated trains"
        assignment, first = self._assignment, self._exchange.position + 1
        log.info(
            "%s: %s, %s, from round %d",
            *(assignment.plan.reason, assignment.replica.name, _words(self._stages), first),
        )
        seated = ReplicaSession(
            self._spec,
            assignment,
            self._services,
            self._exchange,
            self._stage_info,
            self._between_steps,
            self._leaving,
            self._keep_if_due,
        )
        try:
            await seated.run()
        finally:
            self._assignment = seated.assignment  # where it fails, this one is to be given up
        self._assignment = None

    # What is kept

    async def _keep_if_due(self, round_number: int) -> None:
        """A disk that is full costs a checkpoint, not the run."""
        every = self._spec.recovery.checkpoint_every
        # Rounds of long ago that are followed in a hurry need no checkpoint of their own.
        is_old = round_number <= self._services.membership.run_view.round_number - 2 * every
        if round_number % every or is_old or not self._exchange.is_even:
            return
        try:
            await self._keep(round_number)
        except HetnodeError as error:
            if error.code is not ErrorCode.DISK_FULL:
                raise
            log.error("training goes on without a checkpoint of round %d: %s", round_number, error)

    async def _keep(self, round_number: int) -> None:
        """Write a checkpoint after `round_`, in which everything here is."""
        folder = self._checkpoints / round_folder(round_number)
        async with self._between_steps:
            await self._services.worker.call(WriteCheckpoint(folder, round_number))
        self._kept = folder


def _words(stages: StageRange) -> str:
    return f"stage{'s' * (len(stages) > 1)} {stages}"


def _code_of(error: BaseException) -> ErrorCode | None:
    return error.code if isinstance(error, HetnodeError) else None


def _place_in(run_view: RunView, peer: PeerId) -> ReservedAssignment | None:
    """The place of `peer`, once it has one. Raises RUN_STARTED where the run ends before."""
    if run_view.finished:
        raise run_is_over()
    return run_view.reservation_of(peer)
