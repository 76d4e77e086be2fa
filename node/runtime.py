"""The composition root of a node: joins a run, starts its processes, and trains until the run is over."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Set
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from node.folder import keep_only_run, lock_folder, remember_node_folder
from node.hive.transport import HivemindTransport
from node.ipc.channel import start_child
from node.ipc.worker_calls import CheckDevice, ComputeOptions, LocalData, RequireInitial
from node.ipc.worker_client import WorkerClient
from node.measure.hardware import measure_capacity
from node.measure.measure import LinkProber, known_speed, measure_coordinator, measure_speed
from node.net.admission import (
    announce_leaving,
    join_run,
    leave_run,
    local_address_towards,
    obtain_credentials,
)
from node.net.coordinator_client import Admission, CoordinatorClient
from node.net.directory import Directory
from node.net.link_dialer import Links
from node.net.link_server import LinkServer
from node.net.live_estimates import LiveEstimates
from node.net.membership import Membership, jittered
from node.net.probe import probe_peer
from node.security.identity import Identity
from node.train.cancellation import LeaveRequested, cancel_when_leaving
from node.train.node_loop import End, NodeLoop
from node.train.services import Services
from node.transport.transport import Transport
from protocol.errors import ErrorCode, HetnodeError
from protocol.roles import DEFAULT_ROLE, POLICIES
from protocol.spec.run import RunSpec
from protocol.trust.invite import Invite
from protocol.types import PROTOCOL_VERSION, Capacity, PeerId, PeerRecord, Role

log = logging.getLogger(__name__)

_CLOSE_SECONDS = 3.0
_CLOCK_SECONDS = 2.0
_UNKNOWN_SECONDS, _KNOWN_SECONDS = 15.0, 600.0
_RETRY_SECONDS, _MOST_RETRY_SECONDS = 2.0, 60.0
_TEMPORARY = frozenset((ErrorCode.DHT_UNREACHABLE, ErrorCode.PORT_IN_USE, ErrorCode.HIVEMIND_DIED))
"""Failures that end by themselves, for a node that was in the DHT before."""


@dataclass(frozen=True)
class NodeOptions:
    """What a node chooses for itself; nothing here is part of the run's spec.

    `advertise` is the host name or address under which others reach this machine; None takes the address
    that this machine uses towards the coordinator. `source` and `tokenizer` override where this node reads
    the run's data and tokenizer.json; `initial` is the folder of given parameters from which a run starts.
    With `invite`, the node enrols first; otherwise it has credentials for `run` from before. `role` None
    takes the last role of this node, or that of the invite, or else the default. `join_seconds` None waits
    long for a coordinator that this node knows, and a short time for an unknown one. `measure` says whether
    to measure this machine and its connections; the coordinator then plans with the results.
    `compile` and `activation_checkpointing` are those of node.worker.compute.
    """

    invite: Invite | None
    run: str
    role: Role | None
    folder: Path
    listen_host: str = "0.0.0.0"
    listen_port: int = 0
    dht_port: int = 0
    advertise: str | None = None
    dial_only: bool = False
    device: str = "cpu"
    compile: bool = False
    activation_checkpointing: bool = False
    threads: int = 1
    source: str | None = None
    tokenizer: str | None = None
    initial: str | None = None
    spec_hash: str = ""
    join_seconds: float | None = None
    measure: bool = False

    @property
    def compute(self) -> ComputeOptions:
        return ComputeOptions(self.device, self.compile, self.activation_checkpointing)

    @property
    def patience(self) -> float:
        """How many seconds to try to reach the coordinator."""
        if self.join_seconds is not None:
            return self.join_seconds
        # A coordinator that the node knows may be about to return.
        return _UNKNOWN_SECONDS if self.invite else _KNOWN_SECONDS

    @property
    def initial_folder(self) -> Path | None:
        """The checkpoint of the parameters before round 1."""
        return None if self.initial is None else Path(self.initial)


async def run_node(options: NodeOptions, identity: Identity, leaving: asyncio.Event | None = None) -> Path:
    """Join the run, train until its last round is over, and return the folder of this node's checkpoints.

    Enrols first if there is an invite. When `leaving` is set, the node leaves at the end of the round in
    which it trains. It leaves at once while it starts, moves to other stages, or only follows the rounds.
    When it is cancelled, it leaves in order and without delay. In all cases the coordinator is told and every
    child process ends.

    Raises HetnodeError (alone or in an ExceptionGroup) for every failure that is not a bug; the node has then
    cleaned up after itself.
    """
    leaving = leaving or asyncio.Event()
    async with AsyncExitStack() as stack:
        stack.enter_context(lock_folder(options.folder))
        # The processes that are replaced when this node gets other stages.
        processes = await stack.enter_async_context(AsyncExitStack())
        try:
            node, worker = await cancel_when_leaving(
                leaving, _enter(options, identity, leaving, stack, processes)
            )
        except LeaveRequested:
            log.info("left before it took part")
            return options.folder
        async with asyncio.TaskGroup() as group:
            # Heartbeats begin now: to join the DHT may take longer than the coordinator waits for one.
            background = [
                group.create_task(node.membership.keep()),
                group.create_task(node.coordinator.keep_renewed()),
                group.create_task(announce_leaving(leaving, node.coordinator, node.membership)),
            ]
            if options.measure:
                # The worker gets this before it builds its stages.
                own = (options.device, options.threads, options.folder, node.membership.estimates)
                background.append(group.create_task(measure_speed(worker, node.spec, *own)))
            end, kept = await _train(node, worker, processes)
            for task in background:
                task.cancel()
        await leave_run(node.coordinator, end.value)
        what = "the run is finished" if end is End.FINISHED else "left the run in order"
        log.info("%s; this node's part of the model is in %s", what, kept)
        return kept


@dataclass(frozen=True)
class _Joined:
    """The parts of a node that stay when it gets other stages.

    `admission` returns the coordinator's answer to the newest join. `advertise` is the host under which other
    nodes reach this machine.
    """

    options: NodeOptions
    identity: Identity
    spec: RunSpec
    admission: Callable[[], Admission]
    coordinator: CoordinatorClient
    membership: Membership
    links: Links
    record: PeerRecord
    folder: Path
    advertise: str
    leaving: asyncio.Event


async def _enter(
    options: NodeOptions,
    identity: Identity,
    leaving: asyncio.Event,
    stack: AsyncExitStack,
    processes: AsyncExitStack,
) -> tuple[_Joined, WorkerClient]:
    """Start a worker and join the run. `stack` and `processes` end what is started here."""
    worker = await _start_worker(options, processes)
    # Before other nodes count on this one, it must be clear that it can compute.
    capacity = await _check_device(worker, options)
    estimates = LiveEstimates(capacity)
    credentials = await obtain_credentials(options.invite, options.run, identity, options.patience)
    role = options.role or credentials.role or DEFAULT_ROLE
    coordinator = CoordinatorClient(credentials, identity)
    stack.push_async_callback(coordinator.close)
    advertise = options.advertise or local_address_towards(credentials.api)
    server = LinkServer(lambda: coordinator.credentials.tls, estimates.received)
    endpoint = await _listen(server, role, options, advertise, stack)
    if options.measure:
        known = known_speed(options.folder, credentials.run, options.device, options.threads)
        estimates.capacity = replace(capacity, flops=known)
        await measure_coordinator(coordinator, estimates)
    admission: Admission

    async def join() -> None:
        nonlocal admission
        admission = await join_run(
            coordinator, role, estimates.capacity, endpoint, options.spec_hash, options.patience
        )

    await join()
    stack.push_async_callback(leave_run, coordinator, "stopped before the end")
    estimates.joined()
    credentials.remember(role)
    remember_node_folder(credentials.folder, options.folder)
    spec = admission.spec
    if spec.initial is not None:
        await worker.call(RequireInitial(spec, options.initial_folder))
    log.info("joined run %s as %s, peer %s, spec %s", spec.run_id, role, identity.peer, spec.hash)
    if abs(admission.clock_offset) > _CLOCK_SECONDS:
        log.warning("this machine's clock is wrong by %.0f s", -admission.clock_offset)
    membership = Membership(coordinator, join, spec.timing.heartbeat, estimates)
    server.refuse_probes_of(lambda: membership.run_view.banned)
    server.limit_probes_while(lambda: membership.run_view.trains(identity.peer))
    joined = _Joined(
        options,
        identity,
        spec,
        lambda: admission,
        coordinator,
        membership,
        Links(server, lambda: coordinator.credentials.tls, estimates.received),
        PeerRecord(identity.peer, PROTOCOL_VERSION, role, capacity, endpoint, stages=None),
        keep_only_run(options.folder, credentials.run, credentials.coordinator),
        advertise,
        leaving,
    )
    return joined, worker


async def _listen(
    server: LinkServer, role: Role, options: NodeOptions, advertise: str, stack: AsyncExitStack
) -> str:
    """Accept links if `role` has neighbours. Returns this node's endpoint, "" where it only dials."""
    if options.dial_only or not POLICIES[role].joins_pipelines:
        return ""
    port = await server.start(options.listen_host, options.listen_port)
    stack.push_async_callback(server.close)
    return f"{advertise}:{port}"


async def _check_device(worker: WorkerClient, options: NodeOptions) -> Capacity:
    """The capacity of this machine. Raises HetnodeError if it cannot compute as the options say."""
    free_bytes = await worker.call(CheckDevice(options.compute))
    capacity = measure_capacity(options.device, options.threads)
    # 0 means that the device has no memory of its own.
    return replace(capacity, memory_bytes=free_bytes) if free_bytes else capacity


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
            await node.membership.attach(_admit_nobody)
            worker, transport = await cancel_when_leaving(node.leaving, _restart_processes(node, processes))
    return End.DRAINED, kept


async def _restart_processes(node: _Joined, processes: AsyncExitStack) -> tuple[WorkerClient, Transport]:
    """Replace the processes of a node that gets other stages.

    Tries again after each temporary failure: the node worked before, so the cause lies outside.
    """
    for attempt in count():
        await processes.aclose()
        if attempt:
            await asyncio.sleep(jittered(min(_RETRY_SECONDS * 2 ** (attempt - 1), _MOST_RETRY_SECONDS)))
        try:
            worker = await _start_worker(node.options, processes)
            return worker, await _enter_dht(node, processes)
        except HetnodeError as error:
            if error.code not in _TEMPORARY:
                raise
            log.warning("the processes of this node cannot start yet: %s", error)
    raise AssertionError("the attempts never end by themselves")


async def _enter_dht(node: _Joined, processes: AsyncExitStack) -> Transport:
    """The connection to the other peers, which `processes` ends."""
    options, admission, credentials = node.options, node.admission(), node.coordinator.credentials
    transport = await HivemindTransport.start(
        identity=node.identity,
        certificate=credentials.certificate_file,
        authority=credentials.authority_file,
        run=node.spec.run_id,
        initial_peers=admission.dht_peers,
        listen_host=options.listen_host,
        listen_port=options.dht_port,
        advertise=node.advertise,
        client_mode=options.dial_only,
        clock_offset=admission.clock_offset,
    )
    processes.push_async_callback(transport.close)
    return transport


async def _train_assignment(node: _Joined, worker: WorkerClient, transport: Transport) -> tuple[End, Path]:
    """Train with the present assignment. Returns how that ended, and the folder of the checkpoint."""
    options, identity, membership = node.options, node.identity, node.membership
    async with asyncio.TaskGroup() as group:
        background = [group.create_task(worker.guard())]
        await membership.attach(transport.admit)
        directory = Directory(transport, node.record, membership.estimates)
        background.append(group.create_task(directory.keep()))
        if options.measure:
            prober = LinkProber(
                identity.peer,
                membership,
                directory,
                node.coordinator,
                lambda at, peer: probe_peer(at, peer, node.coordinator.credentials.tls),
                joins_pipelines=POLICIES[node.record.role].joins_pipelines,
            )
            background.append(group.create_task(prober.keep()))
        services = Services(identity, worker, transport, node.coordinator, node.links, membership, directory)
        search_paths = [options.folder.absolute()]
        if options.initial_folder is not None:
            search_paths.append(options.initial_folder)
        local = LocalData(
            options.compute, options.source, options.tokenizer, options.initial_folder, tuple(search_paths)
        )
        training = NodeLoop(node.spec, services, local, node.folder, node.leaving)
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


async def _start_worker(options: NodeOptions, processes: AsyncExitStack) -> WorkerClient:
    """A worker process, which `processes` ends."""
    child = await start_child(
        "node.worker.worker",
        name="worker",
        died=ErrorCode.WORKER_DIED,
        environment={"HETNODE_THREADS": str(options.threads), "OMP_NUM_THREADS": str(options.threads)},
    )
    processes.push_async_callback(child.close, _CLOSE_SECONDS)
    return WorkerClient(child)


async def _admit_nobody(_: Set[PeerId], __: Set[PeerId]) -> None:
    """Used while the node has no transport, and so no allow list."""


async def _save_progress(training: NodeLoop, seconds: float | None) -> None:
    """Save what is new since the last checkpoint, within `seconds`: supervisors kill slow processes."""
    try:
        async with asyncio.timeout(seconds):
            await training.save_progress()
    except (TimeoutError, HetnodeError) as error:
        log.warning("the progress since the last checkpoint is not saved: %s", error)
