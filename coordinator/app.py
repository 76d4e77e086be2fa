"""The coordinator's composition root: run folder, authority, log, ports, DHT bootstrap peer, services."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import grpc

from coordinator.api import enrollment, service
from coordinator.api.access import Access
from coordinator.api.admin import AdminService
from coordinator.api.enrollment import EnrollmentService
from coordinator.api.service import CoordinatorService
from coordinator.authority import (
    CERTIFICATE_SECONDS,
    Authority,
    ServerCertificate,
    open_authority,
    write_bootstrap,
    write_operator,
)
from coordinator.command_loop import RUN_TOPIC, CommandLoop, Stopped
from coordinator.metrics import MetricsFile
from coordinator.state import events
from coordinator.state.apply import replay
from coordinator.state.commands import Start
from coordinator.state.events import Event
from coordinator.state.state import State
from coordinator.status.messages import event_message
from coordinator.store import SqliteStore, Store
from protocol.errors import ErrorCode, HetnodeError
from protocol.pb import hetnode_pb2_grpc as pb_grpc
from protocol.spec.run import RunSpec
from protocol.status import RunPhase
from protocol.types import PeerId

log = logging.getLogger(__name__)

TICK_SECONDS = 0.2
LINGER_SECONDS = 30.0
"""How long the coordinator still serves a finished run if some peers do not leave."""
STOP_SECONDS = 2.0

_WARNINGS = (
    events.AnchorDiverged,
    events.PayloadRejected,
    events.PeerBanned,
    events.PeerLost,
    events.PeerQuarantined,
    events.PeerRetreated,
    events.PeerStruck,
    events.RoundAborted,
)
_DETAILS = (events.PayloadOffered, events.PayloadWithheld, events.HoldingsReported, events.DigestAttested)


class Bootstrap(Protocol):
    """The coordinator's own DHT peer, which other peers contact first."""

    @property
    def addresses(self) -> Sequence[str]: ...

    async def admit(self, peers: Collection[PeerId], banned: Collection[PeerId]) -> None:
        """Refuse all connections of `banned`. Raises HetnodeError if that failed."""

    async def close(self) -> None: ...


class Identity(Protocol):
    """The coordinator's ed25519 key. Nodes accept specs and plans only with its signature."""

    @property
    def peer(self) -> PeerId: ...

    def sign(self, message: bytes) -> bytes: ...


@dataclass(frozen=True)
class ListenAddresses:
    """Where the coordinator listens, as ``host:port``, and the host that it advertises.

    Port 0 takes a free port. `enrollment` None takes the port after that of `api`. `advertise` None
    advertises the host of `api`.
    """

    api: str
    enrollment: str | None = None
    advertise: str | None = None


async def run_coordinator(
    spec: RunSpec,
    folder: Path,
    addresses: ListenAddresses,
    identity: Identity,
    start_bootstrap: Callable[[], Awaitable[Bootstrap]],
    on_ready: Callable[[str, str], None],
    certificate_seconds: float = CERTIFICATE_SECONDS,
) -> None:
    """Serve the run until it is finished and its peers have left, or until cancelled.

    A folder that holds a run continues that run. On cancellation, waiting calls end with UNAVAILABLE, and
    everything is closed within a few seconds. Acknowledged commands are durable, however the process ends.

    Args:
        spec: must equal the spec of the run that has begun in `folder`, if there is one.
        folder: gets coordinator.sqlite, metrics.jsonl, and the files of coordinator.authority; is created.
        start_bootstrap: starts the DHT peer, which is closed here.
        on_ready: called with the advertised addresses of the API and of enrollment once nodes can join.
        certificate_seconds: life of the issued certificates.

    Raises:
        HetnodeError: BAD_ADDRESS, PORT_IN_USE, RUN_FOLDER_IN_USE, STORE_CORRUPT, SPEC_MISMATCH with both
            hashes, or what `start_bootstrap` raises.
    """
    # Before anything is written: a wrong address must not leave a folder behind.
    api_at = host, port = _check_free(addresses.api)
    enrollment_at = _check_free(addresses.enrollment or f"{host}:{port and port + 1}")
    folder.mkdir(parents=True, exist_ok=True)
    async with AsyncExitStack() as stack:
        store = SqliteStore(folder / "coordinator.sqlite")  # locks the folder for this process
        stack.callback(store.close)
        state = _restore_unfinished(store, spec, folder)
        authority = open_authority(folder, spec.run_id, certificate_seconds)
        metrics = stack.enter_context(MetricsFile(folder / "metrics.jsonl"))
        write_bootstrap(authority, folder, identity.peer)  # the DHT peer reads it at its start
        bootstrap = await start_bootstrap()
        stack.push_async_callback(bootstrap.close)
        command_loop, serving = _start_command_loop(stack, spec, store, state, metrics)
        servers, api_address, enrollment_address = _bound_servers(
            command_loop, metrics, authority, identity, bootstrap, addresses, api_at, enrollment_at
        )
        # Before the first call: silence and deadlines of the stored state count from now.
        await command_loop.execute(Start())
        for server in servers:
            await server.start()
            stack.push_async_callback(server.stop, STOP_SECONDS)
        # The stack unwinds this first: waiting calls must end before their server stops.
        stack.callback(command_loop.stop)
        write_operator(authority, folder)
        for task in (
            asyncio.create_task(_renew_certificates(authority, folder, identity.peer)),
            asyncio.create_task(_exclude_from_dht(command_loop, bootstrap)),
        ):
            stack.callback(task.cancel)
        on_ready(api_address, enrollment_address)
        await _tick_until_over(command_loop, serving)


def _bound_servers(
    command_loop: CommandLoop,
    metrics: MetricsFile,
    authority: Authority,
    identity: Identity,
    bootstrap: Bootstrap,
    addresses: ListenAddresses,
    api_at: tuple[str, int],
    enrollment_at: tuple[str, int],
) -> tuple[tuple[grpc.aio.Server, ...], str, str]:
    """The servers of the API and of enrollment, not started yet, and their advertised addresses."""
    api, newcomers = service.new_server(), enrollment.new_server()
    certificate = ServerCertificate(authority)
    api_port = bind(api, *api_at, server_credentials(certificate, authority, clients=True))
    newcomers_port = bind(
        newcomers, *enrollment_at, server_credentials(certificate, authority, clients=False)
    )
    api_address = _address(addresses.advertise or api_at[0], api_port)
    enrollment_address = _address(addresses.advertise or enrollment_at[0], newcomers_port)
    access = Access(command_loop)
    pb_grpc.add_CoordinatorServicer_to_server(
        CoordinatorService(command_loop, metrics, access, authority, identity.sign, bootstrap.addresses), api
    )
    pb_grpc.add_AdminServicer_to_server(
        AdminService(command_loop, access, authority.pin, api_address, enrollment_address), api
    )
    pb_grpc.add_EnrollmentServicer_to_server(
        EnrollmentService(command_loop, authority, identity.peer, api_address), newcomers
    )
    return (api, newcomers), api_address, enrollment_address


def _start_command_loop(
    stack: AsyncExitStack, spec: RunSpec, store: Store, state: State, metrics: MetricsFile
) -> tuple[CommandLoop, asyncio.Task[None]]:
    """The running command loop, which logs and measures every event; `stack` stops it."""

    def observe(event: Event, _: State) -> None:
        metrics.record(event)
        _log(event)

    command_loop = CommandLoop(spec, store, state, observe, lambda message: log.info("%s", message))
    serving = asyncio.create_task(command_loop.run())
    # Unwound in reverse order: the loop stops, then its last commands are stored, then the store is closed.
    stack.push_async_callback(asyncio.wait, {serving})
    stack.callback(command_loop.stop)
    return command_loop, serving


def _restore_unfinished(store: Store, spec: RunSpec, folder: Path) -> State:
    state = restore(store, spec)
    if state.phase is RunPhase.FINISHED:
        raise HetnodeError(
            ErrorCode.RUN_FOLDER_IN_USE,
            f"The run in {folder} is finished.",
            "Give another --folder for a new run, or remove this folder.",
        )
    return state


def restore(store: Store, spec: RunSpec) -> State:
    """The state after the events of `store`. An empty store gets `spec` and begins a new run.

    Raises:
        HetnodeError: SPEC_MISMATCH if `store` holds a run of another spec; STORE_CORRUPT.
    """
    stored_json, events = store.load()
    if stored_json is None:
        store.begin(spec.canonical_json)
    elif (stored := RunSpec.from_json(stored_json)).hash != spec.hash:
        raise HetnodeError(
            ErrorCode.SPEC_MISMATCH,
            f"The folder holds a run of the specification {stored.hash}, but {spec.hash} was given.",
            "Give the options of the stored run, or another folder.",
        )
    return replay(State.of(spec), events)


async def _exclude_from_dht(command_loop: CommandLoop, bootstrap: Bootstrap) -> None:
    """Send every change of the excluded peers to the DHT peer."""
    known = frozenset[PeerId]()

    def changed(state: State) -> frozenset[PeerId] | None:
        banned = state.excluded
        return None if banned == known else banned

    with suppress(Stopped):
        while True:
            known = await command_loop.until(RUN_TOPIC, changed)
            try:
                await bootstrap.admit((), known)
            except HetnodeError as error:
                log.error("the DHT peer may still serve banned peers: %s", error)


async def _renew_certificates(authority: Authority, folder: Path, peer: PeerId) -> None:
    """Renew the certificates of the operator and of the DHT peer until cancelled."""
    while True:
        # A failed renewal is repeated once before the certificate expires.
        await asyncio.sleep(authority.seconds / 3)
        try:
            write_operator(authority, folder)
            write_bootstrap(authority, folder, peer)
        except HetnodeError as error:
            log.error("%s", error)


async def _tick_until_over(command_loop: CommandLoop, serving: asyncio.Task[None]) -> None:
    while not _is_over(command_loop):
        try:
            await command_loop.tick()
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


def _log(event: Event) -> None:
    level = logging.INFO
    if isinstance(event, _WARNINGS):
        level = logging.WARNING
    elif isinstance(event, _DETAILS):
        level = logging.DEBUG
    log.log(level, "%s", event_message(event))


def _check_free(listen: str) -> tuple[str, int]:
    """Host and port of `listen`. Raises BAD_ADDRESS, or PORT_IN_USE for a port that is not free."""
    host, _, port = listen.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise _bad_address(listen, "it is not HOST:PORT")
    try:
        # gRPC only reports that it could not bind. The operating system reports the cause.
        family, kind, _, _, address = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind) as probe:
            # A closed connection of a former coordinator must not count as a port in use.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise _in_use(listen) from None
        raise _bad_address(listen, error.strerror or str(error)) from None
    return host, int(port)


def server_credentials(
    certificate: ServerCertificate, authority: Authority, clients: bool
) -> grpc.ServerCredentials:
    """TLS with a certificate that is renewed in time. `clients`: clients must show one of the run."""

    def configuration() -> grpc.ServerCertificateConfiguration:
        pair = certificate.pair()
        return grpc.ssl_server_certificate_configuration([pair], authority.pem if clients else None)

    return grpc.dynamic_ssl_server_credentials(configuration(), configuration, clients)


def _address(host: str, port: int) -> str:
    host = host.strip("[]")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bind(server: grpc.aio.Server, host: str, port: int, credentials: grpc.ServerCredentials) -> int:
    try:
        return int(server.add_secure_port(f"{host}:{port}", credentials))
    except RuntimeError:
        raise _in_use(f"{host}:{port}") from None


def _bad_address(listen: str, why: str) -> HetnodeError:
    return HetnodeError(
        ErrorCode.BAD_ADDRESS,
        f"The coordinator cannot listen on '{listen}': {why}.",
        "Give an address of this machine, like 127.0.0.1:7700 or 0.0.0.0:7700.",
    )


def _in_use(listen: str) -> HetnodeError:
    return HetnodeError(
        ErrorCode.PORT_IN_USE,
        f"Another program already listens on {listen}.",
        "Stop it, or give this coordinator another port; port 0 takes a free port.",
    )
