"""The composition root of a node: joins a run, starts its processes, and trains until it has to leave."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Set
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path

from node.agreement.comparing import comparison_of
from node.core.train.node_loop import End, NodeLoop
from node.core.train.services import Services
from node.exchange.transport import Entry, Transport, transport_in_use
from node.folder import keep_only_run, remember_node_folder
from node.home.guest.visits import Visit
from node.home.relay.relayed import RelayedNode
from node.home.router.forwarded_ports import ForwardedPorts
from node.ipc.worker_calls import LocalData, RequireInitial
from node.ipc.worker_client import WorkerClient
from node.measure.measure import LinkProber, measure_before_join, measure_speed, own_capacity
from node.monitoring.figures import NodeFigures
from node.net.addresses import ClaimedPorts
from node.net.cancellation import LeaveRequested, cancel_when_leaving
from node.net.coordinator_client import Admission, CoordinatorClient
from node.net.directory import Directory
from node.net.joining import (
    Agreement,
    announce_leaving,
    join_run,
    leave_after,
    leave_run,
    local_address_towards,
    log_admission,
    obtain_credentials,
    wanted_name,
    wanted_role,
)
from node.net.link_server import LinkServer
from node.net.live_estimates import LiveEstimates
from node.net.membership import Membership, RunView, jittered
from node.net.moved_coordinator import follow_coordinator
from node.net.own_address import OwnAddress
from node.net.owners import name_owner
from node.net.probe import probe_peer
from node.net.reach import DirectReach
from node.net.receipts import keep_receipt
from node.net.sources import AcceptedSources, member_peers
from node.net.waiting import CoordinatorWait
from node.objects.lent_objects import LentObjects
from node.options import NodeOptions
from node.security.identity import Identity
from node.snapshots.embedding_snapshots import EmbeddingSnapshots
from protocol.errors import ErrorCode, HetnodeError
from protocol.group.peers import PeerRecord
from protocol.roles import POLICIES
from protocol.server.backoff import pause_after
from protocol.server.line import Line
from protocol.spec.run import RunSpec
from protocol.types import PROTOCOL_VERSION, PeerId, Role

log = logging.getLogger(__name__)

_CLOSE_SECONDS, _JOIN_SECONDS = 3.0, 15.0
_RETRY_SECONDS, _MOST_RETRY_SECONDS = 2.0, 60.0
_TEMPORARY = frozenset((ErrorCode.DHT_UNREACHABLE, ErrorCode.PORT_IN_USE, ErrorCode.TRANSPORT_DIED))
"""Failures that end by themselves, for a node that was in the DHT before."""


async def take_part(
    options: NodeOptions,
    identity: Identity,
    leaving: asyncio.Event,
    joined: Callable[[Membership], None],
    figures: NodeFigures,
) -> Visit:
    """Join the run, and train until its last round is over or this node leaves.

    See :func:`node.process.run_node`. Calls `joined` once it is a member, and keeps `figures` up to date.
    """
    async with AsyncExitStack() as stack:
        # The processes that are replaced when this node gets other stages.
        processes = await stack.enter_async_context(AsyncExitStack())
        figures.wait = wait = CoordinatorWait(options.join_seconds)
        try:
            entering = _enter(options, identity, wait, leaving, stack, processes)
            node, worker = await cancel_when_leaving(leaving, entering)
        except LeaveRequested:
            if wait.is_waiting:
                log.info("stopped before the coordinator answered")
                return Visit(is_over=False, kept=None)
            log.info("left before it took part")
            return Visit(is_over=False, kept=options.folder)
        figures.spec = node.spec
        joined(node.membership)
        end, kept = await _stay(replace(node, figures=figures), worker, processes)
        return Visit(end is End.FINISHED, kept)


async def _stay(node: _Joined, worker: WorkerClient, processes: AsyncExitStack) -> tuple[End, Path]:
    """Train until the run is over or the node leaves. Returns how it ended, and the newest checkpoint."""
    options, coordinator = node.options, node.coordinator
    async with asyncio.TaskGroup() as group:
        # Heartbeats begin now: to join the DHT may take longer than the coordinator waits for one.
        keeping = node.membership.keep(), coordinator.keep_renewed()
        telling = announce_leaving(node.leaving, coordinator, node.membership)
        owner = name_owner(coordinator, node.identity, options.owner)
        background = [group.create_task(each) for each in (*keeping, telling, owner)]
        if options.measure:  # the worker gets this before it builds its stages
            own = (options.device, options.threads, options.folder, node.membership.estimates)
            background.append(group.create_task(measure_speed(worker, node.spec, *own, options.precision)))
        end, kept = await _train(node, worker, processes)
        for task in background:
            task.cancel()
    await keep_receipt(coordinator.credentials, options.folder)
    await leave_run(coordinator, end.value)
    what = "the run is finished" if end is End.FINISHED else "left the run in order"
    log.info("%s; this node's part of the model is in %s", what, kept)
    return end, kept


@dataclass(frozen=True)
class _Joined:
    """The parts of a node that stay when it gets other stages.

    `admission` returns the coordinator's answer to the newest join.
    """

    options: NodeOptions
    identity: Identity
    spec: RunSpec
    admission: Callable[[], Admission]
    coordinator: CoordinatorClient
    membership: Membership
    link_server: LinkServer
    record: PeerRecord
    folder: Path
    reach: DirectReach
    forwarded: ForwardedPorts
    own_address: OwnAddress
    leaving: asyncio.Event
    sources: AcceptedSources = field(default_factory=AcceptedSources)
    figures: NodeFigures = field(default_factory=NodeFigures)

    @property
    def newest_record(self) -> PeerRecord:
        """The record with the addresses at which others reach this node by now."""
        ports = self.reach.ports
        return replace(self.record, endpoint=ports.endpoint, dht=ports.dht)

    def services(self, worker: WorkerClient, transport: Transport, directory: Directory) -> Services:
        return Services(
            self.coordinator.credentials.run,
            self.spec,
            self.identity,
            worker,
            transport,
            self.coordinator,
            self.link_server,
            self.membership,
            directory,
            self.reach.through,
            self.figures,
            partial(comparison_of, self.membership, self.identity.peer),
        )


async def _enter(
    options: NodeOptions,
    identity: Identity,
    wait: CoordinatorWait,
    leaving: asyncio.Event,
    stack: AsyncExitStack,
    processes: AsyncExitStack,
) -> tuple[_Joined, WorkerClient]:
    """Join once it is clear that this node can train. `stack` and `processes` end what is started here."""
    worker = await options.workers.start(options.threads, processes)
    compute, capacity = await own_capacity(worker, options.compute, options.threads)
    options = replace(options, device=compute.device, precision=compute.precision)
    estimates = LiveEstimates(capacity, Line.create(options.line, options.folder / "line"))
    credentials = await obtain_credentials(options.invite, options.run, identity, wait)
    wanted, name = wanted_role(options.role, credentials), wanted_name(options.name, credentials)
    agreement = Agreement(options.folder, options.ask, wanted, capacity, wait)
    told = await agreement.before_join(credentials, options.own_data, options.tokenizer)
    coordinator = CoordinatorClient(credentials, identity)
    stack.push_async_callback(coordinator.close)
    here = await wait.answer(lambda _: local_address_towards(credentials.api))
    server, ports, forwarded = await _open_ports(options, wanted, coordinator, estimates, here, stack)
    if options.measure:
        await measure_before_join(coordinator, estimates, options.folder, compute, options.threads, worker)
    admission: Admission
    me = identity.peer
    reach = RelayedNode(me, options.relay, coordinator, ports, server, stack)

    async def join(seconds: float = _JOIN_SECONDS) -> None:
        nonlocal admission
        claimed = wanted, estimates.capacity, reach.ports.addresses, options.spec_hash
        admission = await _in_turn(wait, coordinator, lambda: join_run(coordinator, *claimed, seconds, name))
        reach.ports.reached = admission.reached

    await wait.answer(join)
    stack.push_async_exit(partial(leave_after, coordinator))
    await agreement.on(credentials, admission.spec, told)
    estimates.joined()
    credentials.remember(wanted, name)
    remember_node_folder(credentials.folder, options.folder)
    await worker.call(RequireInitial(spec := admission.spec, options.initial_folder))
    log_admission(admission, credentials.run, me, ports, -coordinator.clock_offset())
    membership = Membership(coordinator, join, spec.timing.heartbeat, estimates)
    reach.relays = lambda: membership.run_view.relays or admission.relays
    await reach.take()
    _limit_probes(server, membership, me)
    return _Joined(
        options=options,
        identity=identity,
        spec=spec,
        admission=lambda: admission,
        coordinator=coordinator,
        membership=membership,
        link_server=server,
        record=PeerRecord(me, PROTOCOL_VERSION, admission.role, capacity, admission.endpoint, None),
        folder=keep_only_run(options.folder, credentials.run, credentials.coordinator),
        reach=reach,
        forwarded=forwarded,
        own_address=OwnAddress(me, coordinator, membership, reach, here, forwarded.reclaim),
        leaving=leaving,
    ), worker


async def _in_turn(
    wait: CoordinatorWait, coordinator: CoordinatorClient, join: Callable[[], Awaitable[Admission]]
) -> Admission:
    """The admission when an open run has room; until then, perhaps for days, the certificate is renewed."""
    renewing = asyncio.create_task(coordinator.keep_renewed())
    try:
        return await wait.turn(join)
    finally:
        renewing.cancel()


def _limit_probes(server: LinkServer, membership: Membership, me: PeerId) -> None:
    server.refuse_probes_of(lambda: membership.run_view.banned)
    server.limit_probes_while(lambda: membership.run_view.trains(me))


async def _open_ports(
    options: NodeOptions,
    role: Role | None,
    coordinator: CoordinatorClient,
    estimates: LiveEstimates,
    here: str,
    stack: AsyncExitStack,
) -> tuple[LinkServer, ClaimedPorts, ForwardedPorts]:
    """Open the ports of this node, and let the router of a home forward them. `stack` ends both."""
    server = LinkServer(lambda: coordinator.credentials.tls, estimates.received, line=estimates.line)
    is_fixed = options.advertise is not None
    ports = ClaimedPorts(options.advertise or here, options.listen_host, options.dht_port, is_fixed)
    is_wanted = options.port_mapping and not options.advertise and not options.dial_only
    forwarded = ForwardedPorts(coordinator, ports, is_wanted)
    if not options.dial_only:
        await ports.open(server, role, options.listen_port, coordinator.credentials, stack)
        await forwarded.open(here, stack)
    return server, ports, forwarded


async def _train(node: _Joined, worker: WorkerClient, processes: AsyncExitStack) -> tuple[End, Path]:
    """Train until the run is over or the node leaves, with one assignment after the other.

    Returns how the training ended, and the folder of the checkpoint.
    """
    end, kept = End.MOVED, node.folder
    with suppress(LeaveRequested):
        transport = await cancel_when_leaving(node.leaving, _enter_dht(node, processes))
        while True:
            end, kept = await _train_assignment(node, worker, transport)
            if end is not End.MOVED:
                return end, kept
            await node.membership.attach(_skip_allow_list)
            worker, transport = await cancel_when_leaving(node.leaving, _restart_processes(node, processes))
    return End.DRAINED, kept


async def _restart_processes(node: _Joined, processes: AsyncExitStack) -> tuple[WorkerClient, Transport]:
    """Replace the processes of a node that gets other stages.

    Tries again after each temporary failure: the node worked before, so the cause lies outside.
    """
    for attempt in count():
        await processes.aclose()
        if attempt:
            await asyncio.sleep(jittered(pause_after(attempt, _RETRY_SECONDS, _MOST_RETRY_SECONDS)))
        try:
            worker = await node.options.workers.start(node.options.threads, processes)
            return worker, await _enter_dht(node, processes)
        except HetnodeError as error:
            if error.code not in _TEMPORARY:
                raise
            log.warning("the processes of this node cannot start yet: %s", error)
    raise AssertionError("the attempts never end by themselves")


async def _enter_dht(node: _Joined, processes: AsyncExitStack) -> Transport:
    """The connection to the other peers, which `processes` ends."""

    async def enter() -> Entry:
        credentials = node.coordinator.credentials
        dht_peers = node.coordinator.dht_peers or node.admission().dht_peers
        await node.sources.resolve_coordinator(credentials.api, dht_peers)
        sources, ports = node.sources.of(node.membership.run_view), node.reach.ports
        first_peers = await node.reach.first_peers(dht_peers)
        node.reach.admit(sources)
        ports.release()  # the transport listens there from now on
        advertise, advertise_port = node.reach.dht_place()
        return Entry(
            credentials.run,
            credentials.certificate_file,
            credentials.authority_file,
            first_peers,
            listen_host=ports.host,
            listen_port=ports.dht_port,
            advertise=advertise,
            advertise_port=advertise_port,
            client_mode=not node.reach.is_relayed and not ports.reached.dht,
            # After a move the others may not find this node at once; and where tunnels lead to them.
            stays_connected=node.own_address.has_moved or node.reach.is_indirect,
            sources=tuple(sources),
            members=(*member_peers(node.membership.run_view), credentials.coordinator),
            clock_offset=node.coordinator.clock_offset(),
        )

    line, objects = node.link_server.line, LentObjects(node.coordinator)
    transport = await transport_in_use().start(node.identity, enter, line, objects)
    processes.push_async_callback(transport.close)
    return transport


async def _train_assignment(node: _Joined, worker: WorkerClient, transport: Transport) -> tuple[End, Path]:
    """Train with the present assignment. Returns how that ended, and the folder of the checkpoint."""
    options, identity, membership = node.options, node.identity, node.membership
    async with asyncio.TaskGroup() as group:
        background = [group.create_task(worker.guard())]

        async def admit(peers: Set[PeerId], run_view: RunView) -> None:
            # The coordinator's peer fetches the payloads that too few peers report as held.
            peers |= {node.coordinator.credentials.coordinator}
            node.reach.want(peers)
            sources = node.sources.of(run_view)
            node.reach.admit(sources)
            await transport.admit(peers, run_view.banned, sources, peers | member_peers(run_view))
            if moved := node.sources.moved(run_view) - {identity.peer}:
                await transport.disconnect(moved)

        await membership.attach(admit)
        directory = Directory(transport, node.newest_record, membership.estimates)
        follows = follow_coordinator(node.coordinator, membership, directory, transport)
        connects = node.reach.keep_connected(transport, directory)
        uploads = LentObjects(node.coordinator).keep_uploading(node.folder, node.link_server.line)
        told = (each.keep(transport, directory) for each in (node.reach, node.forwarded, node.own_address))
        background += map(group.create_task, (directory.keep(), follows, connects, uploads, *told))
        if options.measure:
            prober = LinkProber(
                identity.peer,
                membership,
                directory,
                node.coordinator,
                lambda at, peer: probe_peer(at, peer, node.coordinator.credentials.tls, node.reach.through),
                joins_pipelines=POLICIES[node.admission().role].joins_pipelines,
            )
            background.append(group.create_task(prober.keep()))
        services = node.services(worker, transport, directory)
        initial = options.initial_folder
        search_paths = (options.folder.absolute(), *(() if initial is None else (initial,)))
        local = LocalData(options.compute, options.own_data, options.tokenizer, initial, search_paths)
        training = NodeLoop(services, local, node.folder, node.leaving, EmbeddingSnapshots)
        try:
            end = await training.run()
            if end is not End.FINISHED:
                await _save_progress(training, seconds=None)
        except asyncio.CancelledError:
            await _save_progress(training, _CLOSE_SECONDS)
            raise
        for task in background:
            task.cancel()
    return end, training.newest_checkpoint


async def _skip_allow_list(_: Set[PeerId], __: RunView) -> None:
    """While the node has no transport, it has no allow list either."""


async def _save_progress(training: NodeLoop, seconds: float | None) -> None:
    """Save what is new since the last checkpoint, within `seconds`: supervisors kill slow processes."""
    try:
        async with asyncio.timeout(seconds):
            await training.save_progress()
    except (TimeoutError, HetnodeError) as error:
        log.warning("the progress since the last checkpoint is not saved: %s", error)
