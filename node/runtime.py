"""The composition root of a node: joins a run, starts its processes, and trains until the run is over."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from node import faults
from node.credentials import RunCredentials, check_in_date, folder_of, load
from node.faults import Moment
from node.folder import locked, settle_in
from node.hardware import measure_capacity
from node.identity import Identity
from node.net.coordinator_client import Admission, CoordinatorClient
from node.net.directory import Directory
from node.net.enrolment import enrol
from node.net.hive.client import Hivemind
from node.net.ipc import Child, start_child
from node.net.link import Links, LinkServer
from node.net.membership import Membership, jittered
from node.train.training import LocalData, Services, Training
from protocol.errors import ErrorCode, HetnodeError
from protocol.invite import Invite
from protocol.types import PROTOCOL_VERSION, Capacity, PeerRecord, Role

log = logging.getLogger(__name__)

_CLOSE_SECONDS = 3.0
_CLOCK_SECONDS = 2.0
_UNKNOWN_SECONDS, _KNOWN_SECONDS = 15.0, 600.0
_FORMER_SECONDS = 30.0
"""How long a node waits for the coordinator to let go of its predecessor."""


@dataclass(frozen=True)
class NodeOptions:
    """What a node chooses for itself; nothing here is part of the run's spec.

    `advertise` is the host name or address under which others reach this machine; None takes the address
    that this machine uses towards the coordinator. `source` and `tokenizer` override where this node reads
    the run's data and tokenizer.json.
    With `invite`, the node enrols first; otherwise it has credentials for `run` from before. `role` None
    takes that in which it was last, or that of the invite, or else a stage. `join_seconds` None waits long
    for a coordinator that this node knows, which may be about to return, and not for an unknown one.
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
    threads: int = 1
    source: str | None = None
    tokenizer: str | None = None
    spec_hash: str = ""
    join_seconds: float | None = None


async def run_node(options: NodeOptions, identity: Identity) -> Path:
    """Join the run, train until its last round is over, and return the folder of this node's checkpoint.

    Enrols first where there is an invite. Cancelling it leaves in order: the coordinator is told and every
    child process ends.

    Raises HetnodeError (alone or in an ExceptionGroup) for every failure that is not a bug; the node has then
    cleaned up after itself.
    """
    async with AsyncExitStack() as stack:
        stack.enter_context(locked(options.folder))
        # The worker needs seconds to import torch: start it while the network is being set up.
        worker = await start_child(
            "node.train.worker",
            name="worker",
            died=ErrorCode.WORKER_DIED,
            environment={"HETNODE_THREADS": str(options.threads), "OMP_NUM_THREADS": str(options.threads)},
        )
        stack.push_async_callback(worker.close, _CLOSE_SECONDS)
        # What this machine lacks must be said before others count on it.
        await worker.call("check", {"device": options.device})
        credentials = await _credentials(options, identity)
        role = options.role or credentials.role or Role.STAGE
        coordinator = CoordinatorClient(credentials, identity)
        stack.push_async_callback(coordinator.close)
        advertise = options.advertise or _address_towards(credentials.api)
        server = LinkServer(lambda: coordinator.credentials.tls)
        endpoint = ""
        if role is Role.STAGE and not options.dial_only:
            port = await server.start(options.listen_host, options.listen_port)
            stack.push_async_callback(server.close)
            endpoint = f"{advertise}:{port}"
        capacity = measure_capacity(options.device, options.threads)

        async def join() -> Admission:
            return await _join(coordinator, role, capacity, endpoint, options)

        admission = await join()
        credentials.remember(role)
        spec = admission.spec
        log.info("joined run %s as %s, peer %s, spec %s", spec.run_id, role, identity.peer, spec.hash)
        await faults.reach(Moment.JOINED, round=0)
        if abs(admission.clock_offset) > _CLOCK_SECONDS:
            log.warning("this machine's clock is wrong by %.0f s", -admission.clock_offset)
        stack.push_async_callback(_leave, coordinator, "stopped before the end")
        membership = Membership(coordinator, join, spec.timing.heartbeat)
        async with asyncio.TaskGroup() as group:
            # Heartbeats begin now: joining the DHT may take longer than a silent peer is believed to live.
            background = [
                group.create_task(membership.keep()),
                group.create_task(coordinator.keep_renewed()),
                group.create_task(_guard(worker)),
            ]
            hivemind = await Hivemind.start(
                identity=identity,
                certificate=credentials.certificate_file,
                authority=credentials.authority_file,
                run=spec.run_id,
                initial_peers=admission.dht_peers,
                listen_host=options.listen_host,
                listen_port=options.dht_port,
                advertise=advertise,
                client_mode=options.dial_only,
                clock_offset=admission.clock_offset,
            )
            stack.push_async_callback(hivemind.close)
            await membership.attach(hivemind.admit)
            directory = Directory(
                hivemind,
                PeerRecord(identity.peer, PROTOCOL_VERSION, role, capacity, endpoint, stages=None),
            )
            background.append(group.create_task(directory.keep()))
            links = Links(server, lambda: coordinator.credentials.tls)
            services = Services(identity, worker, hivemind, coordinator, links, membership, directory)
            local = LocalData(options.device, options.source, options.tokenizer)
            training = Training(
                spec, services, local, settle_in(options.folder, credentials.run, credentials.coordinator)
            )
            try:
                folder = await training.run()
            except asyncio.CancelledError:
                await _keep_progress(training)
                raise
            for task in background:
                task.cancel()
        await _leave(coordinator, "finished")
        log.info("the run is finished; this node's part of the model is in %s", folder)
        return folder


async def _credentials(options: NodeOptions, identity: Identity) -> RunCredentials:
    """Those that the invite brings, or those of before."""
    if options.invite is None:
        credentials = load(folder_of(identity.path, options.run))
        check_in_date(credentials, time.time())
        return credentials
    credentials = await enrol(options.invite, identity, _patience(options))
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


async def _keep_progress(training: Training) -> None:
    """Within the time that a supervisor leaves to those whom it has asked to end."""
    try:
        async with asyncio.timeout(_CLOSE_SECONDS):
            await training.keep_progress()
    except (TimeoutError, HetnodeError) as error:
        log.warning("the progress since the last checkpoint is not kept: %s", error)


async def _guard(worker: Child) -> None:
    """Raise the worker's death as soon as it happens, not when it is next needed."""
    await worker.wait_closed()
    await worker.call("alive", {})


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
