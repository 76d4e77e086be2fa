"""The coordinator's composition root: run folder, authority, log, ports, DHT bootstrap peer, services."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import grpc

from coordinator.api import enrollment, member_server
from coordinator.api.access import AccessControl
from coordinator.api.admin import Admin
from coordinator.api.admission import AdmittingPeer, keep_admitted, keep_published, tell_sources
from coordinator.api.dashboard import Entrance
from coordinator.api.dial_back import DialBack, TlsDialBack
from coordinator.api.enrollment import EnrollmentService
from coordinator.api.operator import ExplanationDesk, OperatorService
from coordinator.api.owners import OwnerDesk
from coordinator.api.public_ports import ListenAddresses, PublicPorts, open_ports
from coordinator.api.public_server import PublicServer, public_server
from coordinator.api.relay import Relay
from coordinator.api.run_records import RunRecords
from coordinator.api.service import CoordinatorService
from coordinator.api.succession import Fence, Partner
from coordinator.arbiter import Arbiter, arbitrate_contested
from coordinator.authority import (
    CERTIFICATE_SECONDS,
    Authority,
    ServerCertificate,
    open_authority,
    renew_certificates,
    write_bootstrap,
)
from coordinator.membership.open_places import CLOSED, OpenTerms
from coordinator.membership.sources import MemberSources
from coordinator.ops.dashboard.dashboard import Dashboard
from coordinator.ops.evaluations import EvaluationDesk
from coordinator.ops.explain.explainer import Explainer
from coordinator.ops.health.alarm import judge_health
from coordinator.ops.health.monitor import HealthMonitor
from coordinator.ops.monitoring.run_metrics import RunMetrics
from coordinator.ops.objects.object_desk import ObjectDesk, open_objects
from coordinator.ops.receipts import Receipts
from coordinator.ops.relay.own_relay import open_relay
from coordinator.ops.standby import StandbyDesk
from coordinator.run.command_loop import CommandLoop, Stopped
from coordinator.run.state.commands import AppointArbiter, Start, TellOwnRelay
from coordinator.run.state.events import Event
from coordinator.run.state.state import State
from coordinator.status.event_levels import log_level
from coordinator.status.messages import event_message
from coordinator.store.decision_log import DecisionLog
from coordinator.store.history import SqliteHistory
from coordinator.store.history_file import HISTORY_FILE
from coordinator.store.metrics import newest_measurements
from coordinator.store.restore import RestoredRun, restore_run
from coordinator.store.store import SqliteStore
from protocol.pb import hetnode_pb2_grpc as pb_grpc
from protocol.pb import operator_pb2_grpc
from protocol.server.gateway import Gateway
from protocol.server.metrics_endpoint import MetricsEndpoint
from protocol.spec.run import RunSpec
from protocol.status import AlarmMode, RunPhase
from protocol.trust.invite import open_invite
from protocol.trust.term import next_term
from protocol.types import PeerId

log = logging.getLogger(__name__)

TICK_SECONDS = 0.2
LINGER_SECONDS = 30.0
"""How long the coordinator still serves a finished run if some peers do not leave."""
STOP_SECONDS = 2.0


class Bootstrap(AdmittingPeer, Protocol):
    """The coordinator's own DHT peer, which other peers contact first."""

    @property
    def addresses(self) -> Sequence[str]: ...

    @property
    def arbiter(self) -> Arbiter | None:
        """Fetches contested payloads as this peer; None if this peer only serves the DHT."""

    async def close(self) -> None: ...


class CoordinatorKey(Protocol):
    """The coordinator's ed25519 key. Nodes accept specs and plans only with its signature."""

    @property
    def peer(self) -> PeerId: ...

    def sign(self, message: bytes) -> bytes: ...


async def run_coordinator(
    spec: RunSpec,
    folder: Path,
    addresses: ListenAddresses,
    identity: CoordinatorKey,
    start_bootstrap: Callable[[str], Awaitable[Bootstrap]],
    on_ready: Callable[[str, str, str], None],
    certificate_seconds: float = CERTIFICATE_SECONDS,
    dial_back: DialBack | None = None,
    alarm: AlarmMode = AlarmMode.WARN,
    terms: OpenTerms = CLOSED,
    partner: Partner | None = None,
) -> bool:
    """Serve the run until it is finished and its peers have left, or until cancelled.

    Returns False at once if the run in `folder` was finished before; a run that is not continues. On
    cancellation, waiting calls end with UNAVAILABLE, and all is closed soon. What is acknowledged is durable.

    Args:
        spec: must equal the spec of the run that has begun in `folder`, if there is one.
        folder: gets coordinator.sqlite, .head, metrics.jsonl, history.sqlite, and the authority.
        start_bootstrap: starts the DHT peer of the run with this id; the peer is closed here.
        on_ready: called with the run's id and the advertised addresses of API and enrollment, at last.
        certificate_seconds, dial_back: life of certificates; tries what peers claim, None: over the network.
        alarm, terms, partner: if training looks unhealthy; who needs no invite; the run's other coordinator.

    Raises HetnodeError: BAD_ADDRESS, PORT_IN_USE, RUN_FOLDER_IN_USE, STORE_CORRUPT, COORDINATOR_REPLACED,
    SPEC_MISMATCH with both hashes, or what `start_bootstrap` raises.
    """
    async with AsyncExitStack() as stack:
        # Before anything is written: a wrong address must not leave a folder behind.
        ports, endpoint = open_ports(addresses, stack), _metrics_endpoint(addresses, stack)
        relay = open_relay(addresses, ports, identity.peer, stack)
        dashboard = Dashboard(addresses.dashboard, addresses.near_dashboard, stack)
        objects = await open_objects(addresses.objects, spec)
        store = _open_store(folder, identity, stack)
        authority = open_authority(folder, spec.name, certificate_seconds)
        restored = restore_run(stack, store, spec, authority.run_id(spec), folder)
        if restored.state.phase is RunPhase.FINISHED:
            await asyncio.to_thread(restored.history.close, None)
            return False
        write_bootstrap(authority, folder, identity.peer)  # the DHT peer reads it at its start
        await (partner := partner or Partner(folder)).check(authority, restored.state.term)
        bootstrap = await _opened(stack, start_bootstrap(restored.state.run))
        command_loop, serving, records, health = _start_run(stack, store, restored, folder, dashboard)
        run = _run_of(command_loop, records, store, authority, identity, bootstrap, partner, ports.api)
        standby = StandbyDesk(store, records.metrics, run.fence)
        command_loop.confirmed = standby.confirmed
        desk = ObjectDesk(run.access, command_loop, objects)
        servers = _public_servers(run, dial_back, ports, relay, terms, standby, desk)
        await _begin(command_loop, partner, bootstrap, identity.peer, relay)
        await _start_servers(stack, run, ports, servers, endpoint, relay)
        # The stack unwinds this first: waiting calls must end before their server stops.
        stack.callback(command_loop.stop)
        _start_work(stack, run, ports, folder, desk)
        dashboard.serve(folder, command_loop, records, _entrance(authority, ports, addresses.contact, terms))
        on_ready(command_loop.state.run, *ports.advertised)
        await _tick_until_over(command_loop, serving, health, alarm)
        run.fence.raise_error()
    return True


@dataclass(frozen=True)
class _Run:
    """What the services of the run share."""

    command_loop: CommandLoop
    records: RunRecords
    store: SqliteStore
    access: AccessControl
    sources: MemberSources
    authority: Authority
    identity: CoordinatorKey
    bootstrap: Bootstrap
    fence: Fence


def _run_of(
    command_loop: CommandLoop,
    records: RunRecords,
    store: SqliteStore,
    authority: Authority,
    identity: CoordinatorKey,
    bootstrap: Bootstrap,
    partner: Partner,
    api: Gateway,
) -> _Run:
    """The fence, the noted sources and the access control are made here."""
    fence = Fence(command_loop, partner, identity.peer, identity.sign, tuple(bootstrap.addresses))
    sources = MemberSources()
    access = AccessControl(command_loop, sources, api.source_of, api.port_of, fence.check)
    return _Run(command_loop, records, store, access, sources, authority, identity, bootstrap, fence)


def _entrance(authority: Authority, ports: PublicPorts, contact: str, terms: OpenTerms) -> Entrance:
    """What the page of the run tells newcomers: the invite for everyone, where the run is open."""
    everyones = open_invite(*ports.advertised, authority.pin).encode() if terms.members else ""
    return Entrance(authority.pin.hex(), contact, everyones)


def _open_store(folder: Path, identity: CoordinatorKey, stack: AsyncExitStack) -> SqliteStore:
    """The event log of the run in `folder`, which it locks for this process until `stack` unwinds."""
    folder.mkdir(parents=True, exist_ok=True)
    store = SqliteStore(folder / "coordinator.sqlite", identity.peer, identity.sign)
    stack.callback(store.close)
    return store


async def _opened(stack: AsyncExitStack, starting: Awaitable[Bootstrap]) -> Bootstrap:
    bootstrap = await starting
    stack.push_async_callback(bootstrap.close)
    return bootstrap


async def _begin(
    command_loop: CommandLoop, partner: Partner, bootstrap: Bootstrap, own: PeerId, relay: Relay | None
) -> None:
    await partner.check_silent()  # again: to start the DHT peer takes seconds
    # Before the first call: silence and deadlines of the stored state count from now.
    term = next_term(command_loop.state.term, command_loop.now()) if partner.takes_over else 0
    await command_loop.execute(Start(term))
    await command_loop.execute(AppointArbiter(own if bootstrap.arbiter else None))
    if relay is not None:
        await command_loop.execute(TellOwnRelay(relay.address.endpoint, relay.uplink))


def _metrics_endpoint(addresses: ListenAddresses, stack: AsyncExitStack) -> MetricsEndpoint | None:
    if addresses.metrics is None:
        return None
    endpoint = MetricsEndpoint(addresses.metrics)
    stack.push_async_callback(endpoint.close)
    return endpoint


async def _start_servers(
    stack: AsyncExitStack,
    run: _Run,
    ports: PublicPorts,
    servers: tuple[PublicServer, PublicServer],
    endpoint: MetricsEndpoint | None,
    relay: Relay | None,
) -> None:
    if endpoint is not None:
        await endpoint.start(RunMetrics(run.store.files, run.command_loop, servers, run.records).read)
    if ports.is_shared:
        stack.push_async_callback(ports.api.close)
    for server in servers:
        await server.start()
        stack.push_async_callback(server.stop, STOP_SECONDS)
    if relay is not None:
        told = run.command_loop, run.authority, run.sources, run.bootstrap.addresses
        await relay.start(*told, servers, stack)


def _public_servers(
    run: _Run,
    dial_back: DialBack | None,
    ports: PublicPorts,
    relay: Relay | None,
    terms: OpenTerms,
    standby: StandbyDesk,
    objects: ObjectDesk,
) -> tuple[PublicServer, PublicServer]:
    """The servers of the API and of enrollment, not started yet, at their gateways and addresses."""
    command_loop, access, authority, identity = run.command_loop, run.access, run.authority, run.identity
    gateway, entrance = ports.api, ports.enrollment
    certificate = ServerCertificate(authority)
    members = CoordinatorService(
        command_loop,
        run.records,
        access,
        run.sources,
        authority,
        identity.sign,
        run.bootstrap.addresses,
        dial_back or TlsDialBack(authority.pem, gateway.source_of),
        relay.address if relay else None,
        terms,
        run.fence.told,
    )
    admin = Admin(command_loop, run.records.resting, authority.pin, *ports.advertised)
    operator = OperatorService(access, (admin, standby), _desks(run, objects))
    newcomers = EnrollmentService(
        command_loop, authority, identity.peer, ports.advertised[0], entrance.source_of, terms
    )
    api_admission = member_server.admission(
        access, command_loop.spec, gateway.source_of, gateway.close_connection
    )
    newcomers_admission = enrollment.admission(entrance.source_of, entrance.close_connection)

    def api(*options: tuple[str, int]) -> grpc.aio.Server:
        server = member_server.new_server(api_admission, command_loop.spec, *options)
        pb_grpc.add_CoordinatorServicer_to_server(members, server)
        operator_pb2_grpc.add_OperatorServicer_to_server(operator, server)
        return server

    def enrolling(*options: tuple[str, int]) -> grpc.aio.Server:
        server = enrollment.new_server(newcomers_admission, *options)
        pb_grpc.add_EnrollmentServicer_to_server(newcomers, server)
        return server

    own = (None, None) if ports.is_shared else (gateway, entrance)
    return (
        public_server(own[0], api, certificate, authority, True, api_admission.refused),
        public_server(own[1], enrolling, certificate, authority, False, newcomers_admission.refused),
    )


def _desks(run: _Run, objects: ObjectDesk) -> tuple[object, ...]:
    """What answers the calls of members and operators that no training needs."""
    command_loop, access, history = run.command_loop, run.access, run.records.history
    receipts = Receipts(access, command_loop.spec, command_loop.state.run, history, run.store)
    explaining, owners = ExplanationDesk(run.records.explain), OwnerDesk(access, command_loop)
    return explaining, receipts, owners, EvaluationDesk(command_loop), objects


def _start_work(
    stack: AsyncExitStack, run: _Run, ports: PublicPorts, folder: Path, objects: ObjectDesk
) -> None:
    """Tell DHT peer and members who is admitted, publish the API, arbitrate; `stack` ends all work."""
    command_loop, bootstrap, sources, fence = run.command_loop, run.bootstrap, run.sources, run.fence
    for work in (
        fence.keep(),
        renew_certificates(run.authority, folder, fence.coordinator),
        keep_admitted(command_loop, bootstrap, sources),
        tell_sources(command_loop, sources),
        keep_published(bootstrap, fence.coordinator, ports.advertised[0]),
        arbitrate_contested(command_loop, bootstrap.arbiter),
        objects.keep_clean(),
    ):
        stack.callback(asyncio.create_task(work).cancel)


def _health(restored: RestoredRun) -> HealthMonitor:
    health = HealthMonitor(restored.state)
    metrics = restored.metrics
    health.resume(restored.state, newest_measurements(metrics.path, metrics.size))
    return health


def _start_run(
    stack: AsyncExitStack,
    store: SqliteStore,
    restored: RestoredRun,
    folder: Path,
    dashboard: Dashboard,
) -> tuple[CommandLoop, asyncio.Task[None], RunRecords, HealthMonitor]:
    """The running command loop, and the records and the monitor that follow its events."""
    state, metrics, writer, health = restored.state, restored.metrics, restored.history, _health(restored)
    history = SqliteHistory(folder / HISTORY_FILE, writer)
    observers = metrics.record, health.note, dashboard.feed.note

    def observe(event: Event, before: State, after: State) -> None:
        writer.record(event, before, after)
        for each in observers:
            each(event)
        log.log(log_level(event), "%s", event_message(event))

    command_loop = CommandLoop(store, state, observe)
    serving = asyncio.create_task(command_loop.run())
    # Unwound in reverse order: the loop stops, then its last commands are stored, then the store is closed.
    stack.push_async_callback(asyncio.wait, {serving})
    stack.callback(command_loop.stop)
    records = RunRecords(
        metrics,
        DecisionLog(store),
        health,
        history,
        dashboard.resting,
        explain=Explainer(command_loop, store, history, dashboard.resting).explain,
    )
    return command_loop, serving, records, health


async def _tick_until_over(
    command_loop: CommandLoop, serving: asyncio.Task[None], health: HealthMonitor, mode: AlarmMode
) -> None:
    while not _is_over(command_loop):
        try:
            await command_loop.tick()
            await judge_health(command_loop, health, mode)
        except Stopped:
            await asyncio.wait({serving})
            serving.result()  # raises the error of the store
            return
        await asyncio.sleep(TICK_SECONDS)


def _is_over(command_loop: CommandLoop) -> bool:
    state = command_loop.state
    if state.phase is not RunPhase.FINISHED:
        return False
    all_left = not any(peer.is_live for peer in state.peers.values())
    # A coordinator that continues in its last seconds still gives its peers time to leave.
    return all_left or command_loop.now() - max(state.finished_at, state.started_at) > LINGER_SECONDS
