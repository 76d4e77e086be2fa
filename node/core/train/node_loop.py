"""One node's training from its first reservation to the last round: read :meth:`NodeLoop.run` top to bottom.

A node follows the log of decisions until a plan assigns it to a replica. It trains under that plan until the
plan ends or its replica, its links or the coordinator fail. Then it follows again.

One file because each failure, wherever it arises, leads back to the log of decisions.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from math import inf
from pathlib import Path

from node.checkpoint import parts
from node.checkpoint.layout import round_folder
from node.core.train.link_snapshots import MakeSnapshots
from node.core.train.member_anchors import MemberAnchors, reservation_in, run_is_over
from node.core.train.recovery import Recovery
from node.core.train.remedies import Remedy, code_of, is_final_after_the_run, remedy_for, when_disk_has_room
from node.core.train.replica_session import UNLINKED, ReplicaSession, Superseded
from node.core.train.services import Services
from node.exchange.transport import ServedStages
from node.folder import keep_only_stages
from node.ipc.worker_calls import Abandon, Build, LocalData, WriteCheckpoint
from node.monitoring.figures import Activity
from node.net.cancellation import LeaveRequested, cancel_when, cancel_when_leaving
from node.net.link import FrameRefused
from node.net.membership import PeerAssignment, RunView, jittered, until_answered
from protocol.errors import ErrorCode, HetnodeError, first_error
from protocol.spec.run import RunSpec
from protocol.status import Wait
from protocol.types import ReservedAssignment, StageRange

log = logging.getLogger(__name__)

_RETRY_SECONDS, _MOVE_SECONDS, _OPERATOR_SECONDS = 2.0, 10.0, 30.0


class End(Enum):
    """Why a node's training has ended: the run is over, the node moves to other stages, or it leaves."""

    FINISHED = "finished"
    MOVED = "moved"
    DRAINED = "drained"


class _Moved(Exception):
    """The stages that are reserved for this node are not those that it has built."""


@dataclass
class _Changed(Exception):
    """The next round has other settings than those with which this node has built its stages."""

    spec: RunSpec


class NodeLoop:
    """Trains the stages that are reserved for this node until the last round of the run.

    Args:
        local: how this machine computes, and where its files are.
        folder: of this node; checkpoints and committed payloads are kept below it.
        leaving: set when this node has to leave: at once, or at the end of the round in which it trains,
            which it does not await while the coordinator is away.

    Attributes:
        newest_checkpoint: folder of the newest checkpoint; before the first, the folder of all of them.
    """

    def __init__(
        self,
        services: Services,
        local: LocalData,
        folder: Path,
        leaving: asyncio.Event,
        make_snapshots: MakeSnapshots,
    ) -> None:
        self._services, self._local = services, local
        self._first_spec = self._spec = services.spec  # the latter is the one with which stages are built
        self._folder, self._leaving, self._make_snapshots = folder, leaving, make_snapshots
        self._checkpoints, self._payloads = folder / "checkpoint", folder / "payloads"
        self.newest_checkpoint = self._checkpoints
        self._assignment: PeerAssignment | None = None
        self._given_up_epoch = 0  # assignments of plans up to this one do not count any more
        # Set by _build_stages:
        self._stages: StageRange
        self._anchors: MemberAnchors
        self._recovery: Recovery
        self._is_built = self._is_ready = False  # built: once at least; ready: and their anchors are loaded

    async def run(self) -> End:
        """Build the reserved stages and train; write a checkpoint of the last round where the run ends.

        Raises HetnodeError for every failure that this node cannot recover from; what was committed stays.
        """
        try:
            while True:
                try:
                    await self._build_and_train()
                    break
                except _Changed as changed:
                    await cancel_when_leaving(self._leaving, when_disk_has_room(self.save_progress))
                    self._use(changed.spec)
        except _Moved as moved:
            log.info("%s", moved)
            return End.MOVED
        except LeaveRequested:
            return End.DRAINED
        await self._write_checkpoint(self._spec.rounds)
        await self._serve_until_finished()
        return End.FINISHED

    def _use(self, spec: RunSpec) -> None:
        self._services = replace(self._services, spec=spec)
        self._spec = self._services.figures.spec = spec

    async def _build_and_train(self) -> None:
        """Build the reserved stages, and train to the last round. Raises _Changed, _Moved, LeaveRequested."""
        await cancel_when_leaving(self._leaving, self._build_stages())
        try:
            self._check_settings()  # the anchors may come from peers that are far ahead
            await self._train_all_rounds()
            self._check_settings()  # or they have jumped to the last round that was known
        finally:
            self._anchors.attestations.drop()
            if self._anchors.snapshots is not None:
                await self._anchors.snapshots.close()

    def _check_settings(self) -> None:
        """Raises _Changed where the next round has other settings than the stages were built with."""
        following = self._anchors.position + 1
        spec = self._services.membership.run_view.spec_in(following, self._first_spec)
        # A coordinator that is behind may know of fewer rounds than are applied here.
        if spec != self._spec and self._anchors.position <= spec.rounds:
            log.info("round %d has other settings", following)
            raise _Changed(spec)

    async def _serve_until_finished(self) -> None:
        """Stay for members that still lack payloads of the last rounds, until the coordinator ends the run.

        Not longer than it waits for them, nor while it is away or when this node has to leave.
        """
        membership = self._services.membership
        ends = [
            asyncio.create_task(membership.until(lambda run_view: run_view.finished or None)),
            asyncio.create_task(membership.until_away()),
            asyncio.create_task(self._leaving.wait()),
        ]
        try:
            longest = self._spec.timing.decide
            await asyncio.wait(ends, timeout=longest, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in ends:
                each.cancel()
            await asyncio.gather(*ends, return_exceptions=True)

    async def _train_all_rounds(self) -> None:
        failure: BaseException | None = None
        failed_in = 0  # the session: who has joined again since need not do so
        while self._anchors.position != self._spec.rounds:
            session = self._services.membership.run_view.session
            try:
                if failure is not None:
                    await cancel_when_leaving(self._leaving, self._recover_from(failure, failed_in))
                    failure = None
                if await cancel_when_leaving(self._leaving, self._follow_until_assigned()):
                    await cancel_when(self._left_without_coordinator(), self._train_assignment())
            except (Superseded, HetnodeError, BaseExceptionGroup) as error:
                failure, failed_in = first_error(error), session
                self._check_reservation()
                if code_of(failure) is ErrorCode.BAD_REQUEST:
                    await self._wait_for_move()
                if self._services.membership.run_view.finished and is_final_after_the_run(failure):
                    raise run_is_over() from None
                if remedy_for(failure) is None:
                    raise

    async def save_progress(self) -> None:
        """Write a checkpoint from which a later start of this node continues. Call it before an early end."""
        if self._is_ready:
            await self._abandon()
        if self._is_ready and self._anchors.is_even:
            await self._write_checkpoint(self._anchors.position)

    # Following, until a plan assigns this node to a replica

    async def _build_stages(self) -> None:
        """Build the stages that are reserved for this node, and load their anchors."""
        peer, membership = self._services.identity.peer, self._services.membership
        with self._services.figures.waits.on(Wait.ASSIGNMENT):
            reservation = await membership.until(lambda run_view: reservation_in(run_view, peer))
        if is_again := self._is_built:
            self._check_reservation()
        else:  # until it is known which anchors are here
            self._use(membership.run_view.spec_in(1, self._first_spec))
        spec, services = self._spec, self._services
        self._is_ready = False
        self._stages = stages = reservation.stages
        keep_only_stages(self._folder, stages)
        log.info("this node is reserved for replica-%d, %s", reservation.replica, stages.text)
        stage_info = await services.worker.call(Build(spec, stages, self._local))
        if not is_again:  # what is served does not depend on settings that change
            capacities = {stage: stage_info.capacities[stage] for stage in stages}
            kept = self._payloads, self._checkpoints, spec.recovery.keep_rounds
            hosted = ServedStages(capacities, *kept, spec=spec, initial_folder=self._local.initial)
            await services.transport.host_stages(hosted)
            await services.directory.take_stages(stages)
        self._anchors = MemberAnchors(services, stages, stage_info, self._checkpoints, self._make_snapshots)
        self._recovery = Recovery(services, self._anchors, self._checkpoints)
        await self._note_kept()
        await self._recovery.load_at_start()
        self._is_built = self._is_ready = True

    async def _follow_until_assigned(self) -> bool:
        """Apply decisions until a plan assigns this node to a replica; False where the run is over before."""
        membership, anchors = self._services.membership, self._anchors
        self._services.figures.activity = Activity.FOLLOWING
        await self._recovery.catch_up()
        attested_round = -1
        while anchors.position != self._spec.rounds:
            if await self._recovery.roll_back():
                await self._write_checkpoint_if_due(anchors.position)
            self._check_settings()
            next_round = anchors.position + 1
            is_caught_up = anchors.position >= membership.run_view.round_number - 1
            if is_caught_up and attested_round < anchors.position and self._has_own_reservation:
                await anchors.attest_all()
                attested_round = anchors.position
            membership.progress = (next_round, 0)
            is_untold = is_caught_up and attested_round < anchors.position
            self._assignment = await self._assignment_or_decision(next_round, is_untold)
            if self._assignment is not None:
                self._check_settings()  # the plan may have come meanwhile
                return True
            await anchors.follow(next_round)
            await self._write_checkpoint_if_due(next_round)
        return False

    @property
    def _reservation(self) -> ReservedAssignment | None:
        return self._services.membership.run_view.reservation_of(self._services.identity.peer)

    @property
    def _has_own_reservation(self) -> bool:
        reservation = self._reservation
        return reservation is not None and reservation.stages == self._stages

    def _check_reservation(self) -> None:
        """Raises _Moved where other stages are reserved for this node."""
        reservation = self._reservation
        if reservation is not None and reservation.stages != self._stages:
            raise _Moved(
                f"this node moves from {self._stages.text} to {reservation.stages.text} of "
                f"replica-{reservation.replica}: its processes start anew"
            )

    async def _wait_for_move(self) -> None:
        """Wait a moment for another reservation. Raises _Moved when it arrives."""
        # The coordinator refuses a moved node's usual requests, perhaps before the node knows of the move.
        with suppress(TimeoutError):
            async with asyncio.timeout(_MOVE_SECONDS):
                await self._services.membership.until(lambda _: self._check_reservation())

    async def _assignment_or_decision(self, round_number: int, is_untold: bool) -> PeerAssignment | None:
        """This node's assignment in a round as soon as it has one; None as soon as the round is decided.

        `is_untold`: its anchor is not attested. Raises Superseded as soon as it has the reservation for that.
        """
        peer = self._services.identity.peer

        def assignment_in(run_view: RunView) -> PeerAssignment | None:
            if run_view.round_number > round_number:
                return None  # it is decided already
            self._check_reservation()
            if is_untold and self._has_own_reservation:
                raise Superseded("this node attests its anchor: its reservation has come")
            found = run_view.assignment_of(peer, round_number)
            return found if found is not None and found.plan.epoch > self._given_up_epoch else None

        assigned = asyncio.create_task(self._services.membership.until(assignment_in))
        decided = asyncio.create_task(self._anchors.decision(self._stages.first, round_number))
        try:
            with self._services.figures.waits.on(Wait.ASSIGNMENT):
                await asyncio.wait({assigned, decided}, return_when=asyncio.FIRST_COMPLETED)
            if decided.done():
                decided.result()  # raises where waiting for it has failed
                return None
            return assigned.result()
        finally:
            for task in (assigned, decided):
                task.cancel()
            await asyncio.gather(assigned, decided, return_exceptions=True)

    # Training, and what follows a failure

    async def _train_assignment(self) -> None:
        """Train under this node's assignment until it ends."""
        assert self._assignment is not None, "only a node with an assignment trains"
        assignment, first_round = self._assignment, self._anchors.position + 1
        log.info(
            "%s: %s, %s, from round %d",
            *(assignment.plan.reason, assignment.replica.name, self._stages.text, first_round),
        )
        self._services.figures.activity = Activity.TRAINING
        session = ReplicaSession(
            *(self._services, assignment, self._anchors, self._leaving),
            after_round=self._write_checkpoint_if_due,
            give_up=self._give_up,
        )
        try:
            await session.run()
        finally:
            # After a failure, this is the assignment that has to be given up.
            self._assignment = session.assignment
        self._assignment = None

    async def _left_without_coordinator(self) -> LeaveRequested:
        """Wait until this node has to leave and the coordinator is away: no round can end then."""
        await self._leaving.wait()
        await self._services.membership.until_away()
        log.warning("the coordinator is away: leaving at once, what was learned in this round is kept")
        return LeaveRequested()

    async def _recover_from(self, failure: BaseException, session: int) -> None:
        """Do what lets this node follow again after a failure that has a remedy."""
        log.warning("%s", failure)
        await self._abandon()
        if is_behind := code_of(failure) is ErrorCode.COORDINATOR_BEHIND:
            # The newest copy does not know what this coordinator is told, nor this one what was given up.
            self._assignment, self._given_up_epoch = None, 0
        if self._assignment is not None:
            # Who has lost its links alone, or its plan, can enter a chain at any step of the round.
            is_able = isinstance(failure, Superseded) or code_of(failure) in UNLINKED
            steps = 0 if is_able else None
            await self._give_up(self._assignment, failure, steps)
            self._assignment = None
        match remedy_for(failure):
            case Remedy.REJOIN:
                await self._services.membership.rejoin(session)
            case Remedy.REPLACE_ANCHORS:
                log.warning("loading the anchors of the other replicas")
                await self._recovery.replace_anchors()
            case Remedy.JUMP_FORWARD:
                if not await self._recovery.jump_forward():
                    await asyncio.sleep(jittered(_RETRY_SECONDS))
            case Remedy.WAIT:
                position = self._anchors.position if is_behind else inf
                seconds = jittered(_OPERATOR_SECONDS if is_behind else _RETRY_SECONDS)
                with suppress(TimeoutError):  # or until the coordinator goes on from what nodes hold
                    async with asyncio.timeout(seconds):
                        await self._services.membership.until(
                            lambda view: view.round_number > position + 1 or None
                        )
            case Remedy.FOLLOW | None:
                pass

    async def _abandon(self) -> None:
        """Drop an unfinished inner step. A decision that is being applied is applied first."""
        async with self._anchors.between_steps:
            await self._services.worker.call(Abandon())

    async def _give_up(
        self, assignment: PeerAssignment, reason: BaseException, steps: int | None = None
    ) -> float:
        """Tell the coordinator that this node's replica cannot go on, until the coordinator knows.

        `steps` of the open round are done, and this node can go on from there with other neighbours. Returns
        for how many seconds it waits for that. 0 after `steps`: the coordinator waits for their payload.
        """
        # The coordinator would wait for this replica in every round.
        epoch, position, calls = assignment.plan.epoch, self._anchors.position, self._services.coordinator
        if epoch <= self._given_up_epoch:
            return 0.0
        code, seconds = code_of(reason), 0.0
        told = epoch, str(reason) if code is None else code.label, position + 1, steps
        if isinstance(reason, FrameRefused):  # the two ends are not neighbours again for a while
            refused = epoch, reason.sender, "", reason.cause
            with suppress(HetnodeError):
                await until_answered(lambda: calls.report_link(*refused), _RETRY_SECONDS)
        with suppress(HetnodeError):  # a coordinator that took this node for lost does not wait for it
            seconds = await until_answered(lambda: calls.retreat(*told), _RETRY_SECONDS)
        if seconds or not steps:
            self._given_up_epoch = epoch
        return seconds

    # Checkpoints

    async def _write_checkpoint_if_due(self, round_number: int) -> None:
        """Write a checkpoint where one is due. A full disk costs the checkpoint, not the run."""
        every = self._spec.recovery.checkpoint_every
        # A node that replays old rounds to catch up needs no checkpoints of them.
        run_view = self._services.membership.run_view
        is_old = round_number <= run_view.round_number - 2 * every
        rollback = run_view.rollback
        # Peers that are away now have no other checkpoint from which they could go on after a rollback.
        is_due = round_number % every == 0 or (rollback is not None and rollback.round_number == round_number)
        if not is_due or is_old or not self._anchors.is_even:
            return
        try:
            await self._write_checkpoint(round_number)
        except HetnodeError as error:
            if error.code is not ErrorCode.DISK_FULL:
                raise
            log.error("training goes on without a checkpoint of round %d: %s", round_number, error)

    async def _write_checkpoint(self, round_number: int) -> None:
        """Write a checkpoint. Everything that this node holds must be after that round."""
        folder = self._checkpoints / round_folder(round_number)
        async with self._anchors.between_steps:
            await self._services.worker.call(WriteCheckpoint(folder, round_number))
        self.newest_checkpoint = folder
        await self._note_kept()

    async def _note_kept(self) -> None:
        """Let heartbeats tell which anchors are on the disk."""
        with_embedding = not self._spec.link.embedding_every
        kept = await asyncio.to_thread(parts.rounds_with, self._checkpoints, self._stages, with_embedding)
        self._services.membership.kept = kept
