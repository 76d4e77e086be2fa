"""The composition root of a node: joins a run, starts its processes, and trains until the run is over."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Set
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from node.folder import keep_only_run, lock_folder, remember_node_folder
from node.hive.transport import HivemindTransport
from node.ipc.channel import start_child
from node.ipc.worker_calls import CheckDevice, ComputeOptions, RequireInitial
from node.ipc.worker_client import WorkerClient
from node.measure.hardware import measure_capacity
from node.measure.measure import LinkProber, known_speed, measure_coordinator, measure_speed
from node.net.coordinator_client import Admission, CoordinatorClient
from node.net.directory import Directory
from node.net.enrollment import enroll
from node.net.link_dialer import Links
from node.net.link_server import LinkServer
from node.net.live_estimates import LiveEstimates
from node.net.membership import Membership, jittered
from node.net.probe import probe_peer
from node.security.credentials import RunCredentials, check_in_date, folder_of, load
from node.security.identity import Identity
from node.train.node_loop import End, NodeLoop
from node.train.services import LocalData, Services
from node.train.waiting import AskedToLeave, unless_asked
from node.transport.transport import Transport
from protocol.errors import ErrorCode, HetnodeError
from protocol.roles import DEFAULT_ROLE, policy_of
from protocol.spec.run import RunSpec
from protocol.trust.invite import Invite
from protocol.types import PROTOCOL_VERSION, Capacity, PeerId, PeerRecord, Role

log = logging.getLogger(__name__)

_CLOSE_SECONDS = 3.0
_CLOCK_SECONDS = 2.0
_UNKNOWN_SECONDS, _KNOWN_SECONDS = 15.0, 600.0
_RETRY_SECONDS, _MOST_RETRY_SECONDS = 2.0, 60.0
_PASSING = frozenset((ErrorCode.DHT_UNREACHABLE, ErrorCode.PORT_IN_USE, ErrorCode.HIVEMIND_DIED))
"""What keeps a node that was in the DHT before out of it for a while."""
_FORMER_SECONDS = 30.0
"""How long a node waits for the coordinator to let go of its predecessor."""


@dataclass(frozen=True)
class NodeOptions:
    """What a node chooses for itself; nothing here is part of the run's spec.

    `advertise` is the host name or address under which others reach this machine; None takes the address
    that this machine uses towards the coordinator. `source` and `tokenizer` override where this node reads
    the run's data and tokenizer.json; `initial` is the folder of given parameters from which a run starts.
    With `invite`, the node enrols first; otherwise it has credentials for `run` from before. `role` None
    takes that in which it was last, or that of the invite, or else a stage. `join_seconds` None waits long
    for a coordinator that this node knows, which may be about to return, and not for an unknown one.
    `measure` says whether to measure this machine and its ways to others; plans are then made by it.
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
    def initial_folder(self) -> Path | None:
        """The checkpoint of the parameters before round 1."""
        return None if self.initial is None else Path(self.initial)


async def run_node(options: NodeOptions, identity: Identity, leaving: asyncio.Event | None = None) -> Path:
    """Join the run, train until its last round is over, and return the folder of this node's checkpoints.

    Enrols first where there is an invite. When `leaving` is set, the node leaves at the end of the round in
    which it trains, or at once where it does not: while it starts, moves to other stages, or only follows.
    Cancelling it leaves in order and without delay. In all cases the coordinator is told and every child
    process ends.

    Raises HetnodeError (alone or in an ExceptionGroup) for every failure that is not a bug; the node has then
    cleaned up after itself.
    """
    leaving = leaving or asyncio.Event()
    async with AsyncExitStack() as stack:
        stack.enter_context(lock_folder(options.folder))
        # What is started anew where this node's place gets other stages.
        processes = await stack.enter_async_context(AsyncExitStack())
        try:
            node, worker = await unless_asked(leaving, _enter(options, identity, leaving, stack, processes))
        except AskedToLeave:
            log.info("left before it took part")
            return options.folder
        async with asyncio.TaskGroup() as group:
            # Heartbeats begin now: joining the DHT may take longer than a silent peer is believed to live.
            background = [
                group.create_task(node.membership.keep()),
                group.create_task(node.coordinator.keep_renewed()),
                group.create_task(_announce(leaving, node.coordinator, node.membership)),
            ]
            if options.measure:
                # The worker gets this before it builds its stages.
                own = (options.device, options.threads, options.folder, node.membership.estimates)
                background.append(group.create_task(measure_speed(worker, node.spec, *own)))
            end, kept = await _train(node, worker, processes)
            for task in background:
                task.cancel()
        await _leave(node.coordinator, end.value)
        what = "the run is finished" if end is End.FINISHED else "left the run in order"
        log.info("%s; this node's part of the model is in %s", what, kept)
        return kept


@dataclass(frozen=True)
class _Joined:
    """What a node that has joined keeps when its place gets other stages.

    `admission` is what it was told when it joined last, `advertise` the host under which others reach this
    machine.
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
    """Join the run, and start a worker meanwhile; `stack` and `processes` end what is started here."""
    # The worker needs seconds to import torch: start it while the network is being set up.
    worker = await _start_worker(options, processes)
    # What this machine lacks must be said before others count on it.
    free_bytes = await worker.call(CheckDevice(options.compute))
    capacity = measure_capacity(options.device, options.threads)
    if free_bytes:
        capacity = replace(capacity, memory_bytes=free_bytes)
    estimates = LiveEstimates(capacity)
    credentials = await _credentials(options, identity)
    role = options.role or credentials.role or DEFAULT_ROLE
    coordinator = CoordinatorClient(credentials, identity)
    stack.push_async_callback(coordinator.close)
    advertise = options.advertise or _address_towards(credentials.api)
    server = LinkServer(lambda: coordinator.credentials.tls, estimates.received)
    endpoint = ""
    if policy_of(role).needs_listen_address and not options.dial_only:
        port = await server.start(options.listen_host, options.listen_port)
        stack.push_async_callback(server.close)
        endpoint = f"{advertise}:{port}"
    if options.measure:
        known = known_speed(options.folder, credentials.run, options.device, options.threads)
        estimates.capacity = replace(capacity, flops=known)
        await measure_coordinator(coordinator, estimates)
    admission: Admission

    async def join() -> None:
        nonlocal admission
        admission = await _join(coordinator, role, estimates.capacity, endpoint, options)

    await join()
    stack.push_async_callback(_leave, coordinator, "stopped before the end")
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


async def _train(node: _Joined, worker: WorkerClient, processes: AsyncExitStack) -> tuple[End, Path]:
    """Train wherever this node is moved to; how that has ended, and where its checkpoint is."""
    end, kept = End.MOVED, node.folder
    with suppress(AskedToLeave):
        transport = await unless_asked(node.leaving, _enter_dht(node, processes))
        while True:
            end, kept = await _train_in_place(node, worker, transport)
            if end is not End.MOVED:
                return end, kept
            await node.membership.attach(_nobody)
            worker, transport = await unless_asked(node.leaving, _start_anew(node, processes))
    return End.DRAINED, kept


async def _start_anew(node: _Joined, processes: AsyncExitStack) -> tuple[WorkerClient, Transport]:
    """The processes of a node that has to build other stages.

    Tries until it succeeds, as the node is sound and others may be away for a while.
    """
    for attempt in count():
        await processes.aclose()
        if attempt:
            await asyncio.sleep(jittered(min(_RETRY_SECONDS * 2 ** (attempt - 1), _MOST_RETRY_SECONDS)))
        try:
            worker = await _start_worker(node.options, processes)
            return worker, await _enter_dht(node, processes)
        except HetnodeError as error:
            if error.code not in _PASSING:
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


async def _train_in_place(node: _Joined, worker: WorkerClient, transport: Transport) -> tuple[End, Path]:
    """Train in the place that this node has; how that has ended, and where its checkpoint is."""
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
                joins_pipelines=policy_of(node.record.role).joins_pipelines,
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
                await _keep_progress(training, seconds=None)
        except asyncio.CancelledError:
            await _keep_progress(training, _CLOSE_SECONDS)
            raise
        for task in background:
            task.cancel()
    return end, training.kept


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


async def _nobody(_: Set[PeerId], __: Set[PeerId]) -> None:
    """There is no transport at the moment whose allow list could be replaced."""


async def _announce(leaving: asyncio.Event, coordinator: CoordinatorClient, membership: Membership) -> None:
    """Tell the coordinator as soon as this node is to leave, so that the next plan is made without it.

    And again whenever this node has joined anew, which makes the coordinator forget it.
    """
    await leaving.wait()
    while True:
        session = membership.run_view.session
        try:
            await coordinator.drain("asked to leave")
        except HetnodeError as error:
            log.warning("the coordinator could not be told that this node is about to leave: %s", error)
            if error.code is ErrorCode.COORDINATOR_UNREACHABLE:
                await asyncio.sleep(jittered(_RETRY_SECONDS))
                continue
        await membership.joined_after(session)


async def _credentials(options: NodeOptions, identity: Identity) -> RunCredentials:
    """Those that the invite brings, or those of before."""
    if options.invite is None:
        credentials = load(folder_of(identity.path, options.run))
        check_in_date(credentials, time.time())
        return credentials
    credentials = await enroll(options.invite, identity, _patience(options))
    log.info("enrolled in run %s; its credentials are in %s", credentials.run, credentials.folder)
    return credentials


async def _join(
    coordinator: CoordinatorClient, role: Role, capacity: Capacity, endpoint: str, options: NodeOptions
) -> Admission:
    """Join, waiting for the coordinator to notice that a former node of this identity is no more."""
    waited = 0.0
    while True:
        try:
            return await coordinator.join(role, capacity, endpoint, options.spec_hash, _patience(options))
        except HetnodeError as error:
            if error.code is not ErrorCode.ALREADY_ACTIVE or waited > _FORMER_SECONDS:
                raise
            log.info("%s", error.cause)
        pause = jittered(1.0)
        await asyncio.sleep(pause)
        waited += pause


def _patience(options: NodeOptions) -> float:
    if options.join_seconds is not None:
        return options.join_seconds
    return _UNKNOWN_SECONDS if options.invite else _KNOWN_SECONDS


async def _keep_progress(training: NodeLoop, seconds: float | None) -> None:
    """As far as it can be within `seconds`: a supervisor leaves few to those whom it has asked to end."""
    try:
        async with asyncio.timeout(seconds):
            await training.keep_progress()
    except (TimeoutError, HetnodeError) as error:
        log.warning("the progress since the last checkpoint is not kept: %s", error)


async def _leave(coordinator: CoordinatorClient, reason: str) -> None:
    # A second farewell finds a coordinator that has forgotten this peer, or is gone: both are fine.
    with suppress(HetnodeError):
        await coordinator.leave(reason)


def _address_towards(coordinator: str) -> str:
    """The local address from which this machine reaches the coordinator. Sends nothing."""
    host, _, port = coordinator.rpartition(":")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except (OSError, ValueError) as error:
        raise HetnodeError(
            ErrorCode.BAD_ADDRESS,
            f"'{coordinator}' is not an address that this machine can reach: {error}.",
            "Give the coordinator as HOST:PORT.",
        ) from None
