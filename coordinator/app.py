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
from coordinator.state.apply import replay
from coordinator.state.commands import Start
from coordinator.state.events import (
    AnchorDiverged,
    DigestAttested,
    Event,
    HoldingsReported,
    PayloadOffered,
    PayloadRejected,
    PayloadWithheld,
    PeerBanned,
    PeerLost,
    PeerQuarantined,
    PeerRetreated,
    PeerStruck,
    RoundAborted,
)
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
"""How long a finished run is still served if some peer does not leave."""
STOP_SECONDS = 2.0

_WARNINGS = (
    AnchorDiverged,
    PayloadRejected,
    PeerBanned,
    PeerLost,
    PeerQuarantined,
    PeerRetreated,
    PeerStruck,
    RoundAborted,
)
_DETAILS = (PayloadOffered, PayloadWithheld, HoldingsReported, DigestAttested)


class Bootstrap(Protocol):
    """The DHT peer from which the others start."""

    @property
    def addresses(self) -> Sequence[str]: ...

    async def admit(self, peers: Collection[PeerId], banned: Collection[PeerId]) -> None:
        """Keep the banned out. Raises HetnodeError where that failed."""

    async def close(self) -> None: ...


class Identity(Protocol):
    """The coordinator's ed25519 key, under whose signature spec and plans are believed."""

    @property
    def peer(self) -> PeerId: ...

    def sign(self, message: bytes) -> bytes: ...


@dataclass(frozen=True)
class ListenAddresses:
    """Where the coordinator listens, as ``host:port``, and under which host others reach it.

    Port 0 takes a free one. `enrolment` None is the port after that of `api`. `advertise` None tells others
    the host that is listened on.
    """

    api: str
    enrolment: str | None = None
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

    The same folder continues the run that it holds. When cancelled, waiting calls end with UNAVAILABLE and
    everything is closed within a few seconds; nothing that was acknowledged is lost by any kind of end.

    Args:
        spec: must equal the folder's, if the run has begun there.
        folder: gets coordinator.sqlite, metrics.jsonl, and the files of coordinator.authority; is created.
        doors: where to listen.
        identity: signs the spec and the plans.
        start_bootstrap: starts the DHT peer; it is closed here.
        on_ready: told the advertised addresses of the API and of the enrolment as soon as nodes can join.
        certificate_seconds: life of the certificates that are issued.

    Raises:
        HetnodeError: BAD_ADDRESS, PORT_IN_USE, RUN_FOLDER_IN_USE, STORE_CORRUPT, SPEC_MISMATCH with both
            hashes, or what `start_bootstrap` raises.
    """
    host, port = _check_free(addresses.api)
    enrolment_host, enrolment_port = _check_free(addresses.enrolment or f"{host}:{port and port + 1}")
    folder.mkdir(parents=True, exist_ok=True)
    async with AsyncExitStack() as stack:
        store = SqliteStore(folder / "coordinator.sqlite")
        stack.callback(store.close)
        state = restore(store, spec)
        if state.phase is RunPhase.FINISHED:
            raise HetnodeError(
                ErrorCode.RUN_FOLDER_IN_USE,
                f"The run in {folder} is finished.",
                "Give another --folder for a new run, or remove that one.",
            )
        authority = open_authority(folder, spec.run_id, certificate_seconds)
        metrics = stack.enter_context(MetricsFile(folder / "metrics.jsonl"))
        write_bootstrap(authority, folder, identity.peer)
        bootstrap = await start_bootstrap()
        stack.push_async_callback(bootstrap.close)

        def observe(event: Event, _: State) -> None:
            metrics.record(event)
            _log(event)

        command_loop = CommandLoop(spec, store, state, observe, lambda text: log.info("%s", text))
        serving = asyncio.create_task(command_loop.run())
        stack.push_async_callback(_wait_for_end, serving)
        stack.callback(command_loop.stop)
        certificate = ServerCertificate(authority)
        api, newcomers = service.new_server(), enrollment.new_server()
        port = _bind(api, host, port, _credentials(certificate, authority, clients=True))
        enrolment_port = _bind(
            newcomers, enrolment_host, enrolment_port, _credentials(certificate, authority, clients=False)
        )
        api_address = _address(addresses.advertise or host, port)
        enrolment_address = _address(addresses.advertise or enrolment_host, enrolment_port)
        access = Access(command_loop)
        pb_grpc.add_CoordinatorServicer_to_server(  # type: ignore[no-untyped-call]
            CoordinatorService(command_loop, metrics, access, authority, identity.sign, bootstrap.addresses),
            api,
        )
        pb_grpc.add_AdminServicer_to_server(  # type: ignore[no-untyped-call]
            AdminService(command_loop, access, authority.pin, api_address, enrolment_address), api
        )
        pb_grpc.add_EnrollmentServicer_to_server(  # type: ignore[no-untyped-call]
            EnrollmentService(command_loop, authority, identity.peer, api_address), newcomers
        )
        await command_loop.execute(Start())
        for server in (api, newcomers):
            await server.start()
            stack.push_async_callback(server.stop, STOP_SECONDS)
        stack.callback(command_loop.stop)
        write_operator(authority, folder)
        for keeping in (
            asyncio.create_task(_keep_certificates(authority, folder, identity.peer)),
            asyncio.create_task(_keep_out_the_banned(command_loop, bootstrap)),
        ):
            stack.callback(keeping.cancel)
        on_ready(api_address, enrolment_address)
        await _tick_until_over(command_loop, serving)


def restore(store: Store, spec: RunSpec) -> State:
    """The state that `store` holds, or a new run's, which then begins there.

    Raises:
        HetnodeError: SPEC_MISMATCH if another run has begun there, STORE_CORRUPT.
    """
    stored_json, events = store.load()
    if stored_json is None:
        store.begin(spec.canonical_json)
    elif (stored := RunSpec.from_json(stored_json)).hash != spec.hash:
        raise HetnodeError(
            ErrorCode.SPEC_MISMATCH,
            f"The folder holds a run of the specification {stored.hash}, the one given is {spec.hash}.",
            "Give the options of that run, or another folder.",
        )
    return replay(State.of(spec), events)


async def _keep_out_the_banned(command_loop: CommandLoop, bootstrap: Bootstrap) -> None:
    """Tell the DHT peer of every change of the bans."""
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


async def _keep_certificates(authority: Authority, folder: Path, peer: PeerId) -> None:
    """Renew the certificates of the operator and of the DHT peer as long as the coordinator runs."""
    while True:
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
            await _wait_for_end(serving)
            serving.result()  # why: the log could not be written
            return
        await asyncio.sleep(TICK_SECONDS)


def _is_over(command_loop: CommandLoop) -> bool:
    state = command_loop.state
    if state.phase is not RunPhase.FINISHED:
        return False
    everybody_left = not any(peer.is_live for peer in state.peers.values())
    return everybody_left or command_loop.now() - max(state.finished_at, state.started_at) > LINGER_SECONDS


async def _wait_for_end(serving: asyncio.Task[None]) -> None:
    await asyncio.wait({serving})


def _log(event: Event) -> None:
    level = logging.INFO
    if isinstance(event, _WARNINGS):
        level = logging.WARNING
    elif isinstance(event, _DETAILS):
        level = logging.DEBUG
    log.log(level, "%s", event_message(event))


def _check_free(listen: str) -> tuple[str, int]:
    """Host and port of `listen`, if this machine has that address and nobody listens there.

    gRPC would only say that it failed; the operating system says why.
    """
    host, _, port = listen.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise _bad_address(listen, "it is not HOST:PORT")
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise _in_use(listen) from None
        raise _bad_address(listen, error.strerror or str(error)) from None
    return host, int(port)


def _credentials(
    certificate: ServerCertificate, authority: Authority, clients: bool
) -> grpc.ServerCredentials:
    """TLS under a certificate that is never old; with `clients`, only for those who show one of the run's."""

    def configuration() -> grpc.ServerCertificateConfiguration:
        pair = certificate.pair()
        return grpc.ssl_server_certificate_configuration([pair], authority.pem if clients else None)

    return grpc.dynamic_ssl_server_credentials(configuration(), configuration, clients)


def _address(host: str, port: int) -> str:
    host = host.strip("[]")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _bind(server: grpc.aio.Server, host: str, port: int, credentials: grpc.ServerCredentials) -> int:
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
        f"Another program listens on {listen} already.",
        "Stop it, or give this coordinator another port; port 0 takes a free one.",
    )
