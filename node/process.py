"""The life of a node's process: it takes part in a run, rests when it has to, and comes back."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, replace
from pathlib import Path

from node.folder import keep_only_run, lock_folder, remember_finished, remember_node_folder
from node.home.guest.control import Ask, Contact, answer_commands
from node.home.guest.guest import Guest
from node.home.guest.visits import Visit, take_turns
from node.ipc.ranks import DeviceList, OneWorker
from node.ipc.template import close_own_template
from node.monitoring.figures import Activity, NodeFigures
from node.monitoring.node_metrics import NodeMetrics
from node.monitoring.recent_log import RecentLog
from node.monitoring.report import report_of
from node.net.coordinator_client import CoordinatorClient
from node.net.joining import obtain_credentials
from node.net.membership import Membership, jittered
from node.net.waiting import CoordinatorWait, until_run_is_over
from node.options import NodeOptions
from node.runtime import take_part
from node.security.credentials import folder_of
from node.security.identity import Identity
from protocol.errors import ErrorCode, HetnodeError, cause_of, first_error
from protocol.server.backoff import pause_after
from protocol.server.metrics_endpoint import MetricsEndpoint

log = logging.getLogger(__name__)

_DEATHS = frozenset((ErrorCode.WORKER_DIED, ErrorCode.RANK_FAILED, ErrorCode.TRANSPORT_DIED))
_MOST_DEATHS, _DEATH_SECONDS = 8, 900.0
"""After more deaths of processes within this time, a node ends: to start them again does not help."""
_RETRY_SECONDS, _MOST_RETRY_SECONDS = 2.0, 60.0


async def run_node(
    options: NodeOptions,
    identity: Identity,
    leaving: asyncio.Event | None = None,
    guest: Guest | None = None,
    figures: NodeFigures | None = None,
) -> Path | None:
    """Join the run, train until its last round is over, and return the folder of this node's checkpoints.

    Waits for a coordinator that does not answer, and returns None if it is asked to leave meanwhile.

    When `leaving` is set, the node leaves at the end of the round in which it trains; at once while it
    starts, moves to other stages, or only follows the rounds. When `guest` has to rest, the node leaves in
    the same way, keeps no process but this one, and joins again afterwards. When it is cancelled, it leaves
    in order and without delay. In all cases the coordinator is told and every child process ends.

    Keeps `figures` up to date, which others may read meanwhile.

    Raises HetnodeError (alone or in an ExceptionGroup) for every failure that is not a bug.
    """
    guest = guest or Guest(options.folder)
    async with AsyncExitStack() as stack:
        stack.enter_context(lock_folder(options.folder))
        visitor = _Visitor(options, identity, figures or NodeFigures())
        recent = stack.enter_context(RecentLog())
        if options.metrics is not None:
            endpoint = MetricsEndpoint(options.metrics)
            stack.push_async_callback(endpoint.close)
            await endpoint.start(NodeMetrics(visitor.figures, options.folder).read)
        answers = {Ask.REPORT: lambda: asdict(report_of(visitor.figures)), Ask.LOG: lambda: recent.lines}
        await stack.enter_async_context(answer_commands(options.folder, guest, visitor.contact, answers))
        visit = await take_turns(guest, leaving or asyncio.Event(), visitor.take_part, visitor.rest)
        return options.folder if visit is None else visit.kept


class _Visitor:
    """The node of `options` in one visit after the other. It enrols once."""

    def __init__(self, options: NodeOptions, identity: Identity, figures: NodeFigures) -> None:
        self._options, self._identity = options, identity
        self._kept = options.folder  # with the newest checkpoint
        self._began = asyncio.get_running_loop().time()
        self._deaths: list[float] = []
        self._workers_lost = 0
        self.figures = figures

    def contact(self) -> Contact:
        """How this node stands with its coordinator."""
        joined = self.figures.membership
        if self.figures.place:  # the coordinator has told it
            return Contact()
        if joined is None:
            return Contact(silent_seconds=asyncio.get_running_loop().time() - self._began)
        return Contact(True, joined.away, joined.run_view.round_number)

    async def take_part(self, leaving: asyncio.Event) -> Visit:
        while True:
            self._began = asyncio.get_running_loop().time()
            self.figures.activity = Activity.STARTING
            try:
                visit = await take_part(self._options, self._identity, leaving, self._joined, self.figures)
                break
            except (HetnodeError, BaseExceptionGroup) as error:
                pause = self._pause_after(first_error(error))
                if pause is None:
                    raise
            finally:
                self.figures.membership = None
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await leaving.wait()
                return Visit(is_over=False, kept=self._kept)
        self._kept = visit.kept or self._kept
        self._remember(visit.is_over)
        return visit

    def _pause_after(self, failure: BaseException) -> float | None:
        """Seconds until this node comes back after `failure`; None where it ends.

        A process of this node may be killed at any time: first the worker where the memory of the machine is
        short. So a worker that has died twice computes smaller pieces.
        """
        is_here = isinstance(self._options.workers, OneWorker | DeviceList)
        # A rank on another host whose main process is gone does not come back.
        deaths = _DEATHS if is_here else _DEATHS - {ErrorCode.RANK_FAILED}
        if (code := getattr(failure, "code", None)) not in deaths or self.figures.spec is None:
            return None
        now = asyncio.get_running_loop().time()
        self._deaths = [at for at in self._deaths if now - at < _DEATH_SECONDS] + [now]
        if len(self._deaths) > _MOST_DEATHS:
            return None
        if code is not ErrorCode.TRANSPORT_DIED:
            self._workers_lost += 1
            most = self.figures.spec.inner.microbatch_size
            self._options = replace(self._options, pieces=min(most, 2 ** max(0, self._workers_lost - 1)))
        pause = jittered(pause_after(len(self._deaths), _RETRY_SECONDS, _MOST_RETRY_SECONDS))
        log.error("%s This node starts its processes again in %.0f s.", cause_of(failure), pause)
        if self._options.pieces > 1:
            log.warning("memory may be short: a microbatch is computed in %d pieces", self._options.pieces)
        return pause

    async def rest(self) -> Visit:
        """Keep the node's place until the run is over: its invite and its certificate would expire."""
        self.figures.activity = Activity.RESTING
        close_own_template()  # it holds the memory of what it has imported
        options, wait = self._options, CoordinatorWait(self._options.join_seconds)
        credentials = await obtain_credentials(options.invite, options.run, self._identity, wait)
        self._enrolled(credentials.run)
        # So that commands find this node, also before it has joined for the first time.
        remember_node_folder(credentials.folder, options.folder)
        keep_only_run(options.folder, credentials.run, credentials.coordinator)
        coordinator = CoordinatorClient(credentials, self._identity)
        renewing = asyncio.create_task(coordinator.keep_renewed())
        ending = asyncio.create_task(until_run_is_over(coordinator))
        try:
            done, _ = await asyncio.wait({renewing, ending}, return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                each.result()
        finally:
            renewing.cancel()
            ending.cancel()
            await coordinator.close()
        self._remember(finished=True)
        log.info("the run has ended while this node rested, so what it has of the model is older")
        log.info("the run is finished; this node's part of the model is in %s", self._kept)
        return Visit(is_over=True, kept=self._kept)

    def _joined(self, membership: Membership) -> None:
        self._enrolled(membership.run)
        self.figures.joined(self._identity.peer, membership)

    def _enrolled(self, run: str) -> None:
        self._options = replace(self._options, invite=None, run=run)

    def _remember(self, finished: bool) -> None:
        if self._options.run:  # else it has left before it was enrolled
            remember_finished(folder_of(self._identity.path, self._options.run), finished)
