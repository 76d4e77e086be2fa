"""The coordinator's composition root: run folder, event log, port, DHT bootstrap peer and service."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Protocol

import grpc

from coordinator.events import (
    AnchorDiverged,
    DigestAttested,
    Event,
    HoldingsReported,
    PayloadOffered,
    PayloadWithheld,
    PeerLost,
    RoundAborted,
)
from coordinator.ledger import Ledger, Stopped
from coordinator.metrics import MetricsFile
from coordinator.sentences import describe
from coordinator.service import CoordinatorService, serve
from coordinator.state import Phase, State, replay
from coordinator.store import SqliteStore, Store
from coordinator.transition import Start
from protocol.errors import ErrorCode, HetnodeError
from protocol.spec import RunSpec

log = logging.getLogger(__name__)

TICK_SECONDS = 0.2
LINGER_SECONDS = 30.0
"""How long a finished run is still served if some peer does not leave."""
STOP_SECONDS = 2.0

_WARNINGS = (AnchorDiverged, PeerLost, RoundAborted)
_DETAILS = (PayloadOffered, PayloadWithheld, HoldingsReported, DigestAttested)


class Bootstrap(Protocol):
    """The DHT peer from which the others start."""

    @property
    def addresses(self) -> Sequence[str]: ...

    async def close(self) -> None: ...


async def run_coordinator(
    spec: RunSpec,
    folder: Path,
    listen: str,
    advertise: str | None,
    start_bootstrap: Callable[[], Awaitable[Bootstrap]],
    on_ready: Callable[[str], None],
) -> None:
    """Serve the run until it is finished and its peers have left, or until cancelled.

    The same folder continues the run that it holds. When cancelled, waiting calls end with UNAVAILABLE and
    everything is closed within a few seconds; nothing that was acknowledged is lost by any kind of end.

    Args:
        spec: must equal the folder's, if the run has begun there.
        folder: gets coordinator.sqlite and metrics.jsonl; is created.
        listen: ``host:port`` of the API; port 0 takes a free one.
        advertise: host under which others reach it; None tells them the host of `listen`.
        start_bootstrap: starts the DHT peer; it is closed here.
        on_ready: told the advertised ``host:port`` as soon as nodes can join.

    Raises:
        HetnodeError: BAD_ADDRESS, PORT_IN_USE, RUN_FOLDER_IN_USE, STORE_CORRUPT, SPEC_MISMATCH with both
            hashes, or what `start_bootstrap` raises.
    """
    host, port = _check_free(listen)
    folder.mkdir(parents=True, exist_ok=True)
    async with AsyncExitStack() as stack:
        store = SqliteStore(folder / "coordinator.sqlite")
        stack.callback(store.close)
        state = restore(store, spec)
        if state.phase is Phase.FINISHED:
            raise HetnodeError(
                ErrorCode.RUN_FOLDER_IN_USE,
                f"The run in {folder} is finished.",
                "Give another --folder for a new run, or remove that one.",
            )
        metrics = stack.enter_context(MetricsFile(folder / "metrics.jsonl"))
        bootstrap = await start_bootstrap()
        stack.push_async_callback(bootstrap.close)

        def observe(event: Event, _: State) -> None:
            metrics.record(event)
            _log(event)

        ledger = Ledger(spec, store, state, observe, lambda text: log.info("%s", text))
        serving = asyncio.create_task(ledger.run())
        stack.push_async_callback(_wait_for_end, serving)
        stack.callback(ledger.stop)
        server = serve(CoordinatorService(ledger, metrics, bootstrap.addresses))
        port = _bind(server, host, port)
        await ledger.execute(Start())
        await server.start()
        stack.push_async_callback(server.stop, STOP_SECONDS)
        stack.callback(ledger.stop)
        public = advertise or host.strip("[]")
        on_ready(f"[{public}]:{port}" if ":" in public else f"{public}:{port}")
        await _tick_until_over(ledger, serving)


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
    return replay(State(stages=spec.swarm.stages), events)


async def _tick_until_over(ledger: Ledger, serving: asyncio.Task[None]) -> None:
    while not _is_over(ledger):
        try:
            await ledger.tick()
        except Stopped:
            await _wait_for_end(serving)
            serving.result()  # why: the log could not be written
            return
        await asyncio.sleep(TICK_SECONDS)


def _is_over(ledger: Ledger) -> bool:
    state = ledger.state
    if state.phase is not Phase.FINISHED:
        return False
    everybody_left = not any(peer.is_live for peer in state.peers.values())
    return everybody_left or ledger.now() - max(state.finished_at, state.started_at) > LINGER_SECONDS


async def _wait_for_end(serving: asyncio.Task[None]) -> None:
    await asyncio.wait({serving})


def _log(event: Event) -> None:
    level = logging.INFO
    if isinstance(event, _WARNINGS):
        level = logging.WARNING
    elif isinstance(event, _DETAILS):
        level = logging.DEBUG
    log.log(level, "%s", describe(event))


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


def _bind(server: grpc.aio.Server, host: str, port: int) -> int:
    try:
        return int(server.add_insecure_port(f"{host}:{port}"))
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
