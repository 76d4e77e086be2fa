"""What this node measures of itself and of its connections, and how it is shown.

A node can take part without any of this: what cannot be measured is logged and counts as unknown.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

from node.ipc.worker_calls import CheckDevice, ComputeOptions, MeasureSpeed, Precision
from node.ipc.worker_client import WorkerClient
from node.measure.hardware import measure_capacity
from node.net.coordinator_client import CoordinatorClient
from node.net.directory import Directory
from node.net.live_estimates import LiveEstimates
from node.net.membership import Membership, RunView, jittered
from node.net.probe import Figures, LineProbe
from protocol.errors import ErrorCode, HetnodeError
from protocol.math.flops import microbatch_flops, tokens_of_microbatch
from protocol.memory.needs import shares_main
from protocol.spec.run import RunSpec
from protocol.trust.private_file import write_whole
from protocol.trust.run_id import spec_name_in
from protocol.types import Capacity, PeerId

log = logging.getLogger(__name__)

MOST_NEIGHBOURS = 4

_SPEED_SECONDS = 1.0
_NEIGHBOUR_SECONDS = 1.0
_ECHO_SECONDS = 60.0
_LOOKS = (5.0, 10.0, 20.0, 40.0, 80.0)
"""Seconds between the looks for peers that were not there before."""
_REFUSED_SECONDS = 30.0
_TRIES = 5
_SPEEDS = "speed.json"
_KEPT_SPEEDS = 32
_FINAL = frozenset((ErrorCode.WORKER_DIED, ErrorCode.RANK_FAILED))

OpenProbe = Callable[[str, PeerId], AbstractAsyncContextManager[LineProbe]]
"""Opens a probe of a peer at an endpoint."""


def describe_capacity(capacity: Capacity) -> str:
    """All of it that is known, for people."""
    parts = [f"{capacity.memory_bytes / 2**30:.1f} GiB free on {capacity.device}"]
    if capacity.main_bytes and not shares_main(capacity.device):
        parts.append(f"{capacity.main_bytes / 2**30:.1f} GiB of main memory")
    if capacity.uplink:
        figures = Figures(capacity.round_trip, capacity.uplink, capacity.downlink)
        parts.append(f"to the coordinator {describe_connection(figures)}")
    if capacity.flops:
        parts.append(f"{capacity.flops / 1e9:,.1f} GFLOP/s in training")
    return ", ".join(parts)


def describe_connection(figures: Figures) -> str:
    """The measured connection to one peer, as a line for people."""
    up, down = (f"{rate * 8 / 1e6:,.1f} Mb/s" for rate in (figures.uplink, figures.downlink))
    return f"{up} up, {down} down, {figures.round_trip * 1000:.1f} ms there and back"


def tokens_per_second(spec: RunSpec, stage: int, flops: float) -> float:
    """Tokens per second through the forward and backward pass of `stage`, at this speed."""
    return flops / microbatch_flops(spec, (stage,)) * tokens_of_microbatch(spec)


async def own_capacity(
    worker: WorkerClient, compute: ComputeOptions, threads: int
) -> tuple[ComputeOptions, Capacity]:
    """`compute` with the device and the precision that it leaves open, and the capacity of this machine.

    Raises HetnodeError DEVICE_UNAVAILABLE if it cannot compute like that.
    """
    found = await worker.call(CheckDevice(compute))
    capacity = measure_capacity(found.device, threads, found.free_bytes)
    memory = min(capacity.memory_bytes, compute.memory_limit or capacity.memory_bytes)
    source = "that --memory-limit allows" if memory < capacity.memory_bytes else "free"
    log.info("computes on %s in %s, with %.3g GB %s", found.name, found.precision, memory / 1e9, source)
    chosen = replace(compute, device=found.device, precision=found.precision)
    # Several devices keep their moments, so that main memory adds nothing to theirs.
    main = capacity.main_bytes if worker.ranks == 1 else 0
    return chosen, replace(capacity, memory_bytes=memory, main_bytes=main)


async def training_speed(
    worker: WorkerClient,
    spec: RunSpec,
    device: str,
    threads: int,
    folder: Path,
    precision: Precision = Precision.AUTO,
) -> float:
    """FLOP/s in training the run's layers on `device`, or on those of all ranks, of which it is the first.

    Measured once, then kept in `folder`. Raises HetnodeError: DEVICE_UNAVAILABLE, WORKER_DIED, RANK_FAILED.
    """
    if flops := known_speed(folder, spec.name, device, threads, precision, worker.ranks):
        return flops
    flops = await worker.call(MeasureSpeed(spec, device, _SPEED_SECONDS, precision))
    file = folder / _SPEEDS
    key = _key(spec.name, device, threads, precision, worker.ranks)
    newest = [*_read_speeds(file).items(), (key, flops)][-_KEPT_SPEEDS:]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(dict(newest), indent=2))
    except OSError as error:
        log.warning("the measured speed is not kept: %s", error)
    return flops


def known_speed(
    folder: Path,
    spec_name: str,
    device: str,
    threads: int,
    precision: Precision = Precision.AUTO,
    ranks: int = 1,
) -> float:
    """What was measured before for the run of that name; 0 where nothing was."""
    return _read_speeds(folder / _SPEEDS).get(_key(spec_name, device, threads, precision, ranks), 0.0)


async def measure_speed(
    worker: WorkerClient,
    spec: RunSpec,
    device: str,
    threads: int,
    folder: Path,
    estimates: LiveEstimates,
    precision: Precision = Precision.AUTO,
) -> None:
    """Set the speed in `estimates` by :func:`training_speed`, unless it is known, and log the capacity.

    Raises WORKER_DIED and RANK_FAILED; other failures are logged: training does not depend on this.
    """
    try:
        flops = estimates.capacity.flops or await training_speed(
            worker, spec, device, threads, folder, precision
        )
        estimates.capacity = replace(estimates.capacity, flops=flops)
    except Exception as error:
        if isinstance(error, HetnodeError) and error.code in _FINAL:
            raise
        log.warning("the speed of this machine was not measured: %s", error)
    log.info("this machine: %s", describe_capacity(estimates.capacity))


def _key(run: str, device: str, threads: int, precision: Precision, ranks: int) -> str:
    # The name of a run tells its spec.
    where = device if ranks == 1 else f"{ranks} ranks from {device}"
    return f"{run} {where} {precision} {threads} threads torch {version('torch')}"


def _read_speeds(file: Path) -> dict[str, float]:
    """Those that were kept; a damaged file holds none."""
    try:
        kept = json.loads(file.read_bytes())
        speeds = {str(key): float(value) for key, value in kept.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
    return {key: value for key, value in speeds.items() if math.isfinite(value) and value > 0}


async def measure_before_join(
    coordinator: CoordinatorClient,
    estimates: LiveEstimates,
    folder: Path,
    compute: ComputeOptions,
    threads: int,
    worker: WorkerClient,
) -> None:
    """Set in `estimates` the speed that is kept in `folder`, and the connection to the coordinator."""
    run = spec_name_in(coordinator.credentials.run)
    known = known_speed(folder, run, compute.device, threads, compute.precision, worker.ranks)
    estimates.capacity = replace(estimates.capacity, flops=known)
    await measure_coordinator(coordinator, estimates)


async def measure_coordinator(coordinator: CoordinatorClient, estimates: LiveEstimates) -> None:
    """Measure the connection to the coordinator. A failure is only logged."""
    try:
        async with coordinator.probe() as probe:
            figures = await probe.figures(line=estimates.line)
    except HetnodeError as error:
        log.info("the way to the coordinator was not measured: %s", error.cause)
    else:
        estimates.capacity = replace(
            estimates.capacity,
            uplink=figures.uplink,
            downlink=figures.downlink,
            round_trip=figures.round_trip,
        )


def candidates(
    run_view: RunView, endpoints: Mapping[str, str], me: PeerId, coordinator: str = ""
) -> list[tuple[PeerId, str]]:
    """Peers to measure and their endpoints: first those whose stages lie next to this node's.

    The others follow in an order that differs between nodes, so that not all measure the same peers.
    """
    hosts, place = run_view.hosts(), run_view.reservation_of(me)

    def order(peer: PeerId) -> tuple[bool, bytes]:
        stages = hosts.get(peer)
        own = place.stages if place is not None else None
        is_next = own and stages and (stages.stop == own.first or stages.first == own.stop)
        return not is_next, hashlib.sha256(f"{me} {peer}".encode()).digest()

    others = {PeerId(peer) for peer in endpoints} - run_view.banned - {me, coordinator}
    return [(peer, endpoints[peer]) for peer in sorted(others, key=order)[:MOST_NEIGHBOURS]]


class LinkProber:
    """Measures the connections to others beside the training, rarely and one at a time, in :meth:`keep`.

    `joins_pipelines` says whether the node `me` has neighbours, so that its links to others matter.
    """

    def __init__(
        self,
        me: PeerId,
        membership: Membership,
        directory: Directory,
        coordinator: CoordinatorClient,
        open_probe: OpenProbe,
        joins_pipelines: bool,
    ) -> None:
        self._me, self._membership, self._directory = me, membership, directory
        self._coordinator, self._open_probe = coordinator, open_probe
        self._joins_pipelines = joins_pipelines
        self._measured: dict[PeerId, str] = {}

    async def keep(self) -> NoReturn:
        """Measure candidate neighbours once, then echo them and the coordinator now and then."""
        for _ in range(_TRIES):
            if self._membership.estimates.capacity.uplink:
                break
            # It did not answer before this node joined. Probes must not disturb training.
            if not self._trains:
                await measure_coordinator(self._coordinator, self._membership.estimates)
            await asyncio.sleep(jittered(_REFUSED_SECONDS))
        if self._joins_pipelines:
            await self._measure_neighbours()
        while True:
            await asyncio.sleep(jittered(_ECHO_SECONDS))
            await self._echo()

    async def _measure_neighbours(self) -> None:
        """Measure some peers, until this node trains: then its links show the speed."""
        tried: set[PeerId] = set()
        for pause in _LOOKS:
            endpoints = await self._directory.endpoints()
            others = self._me, self._coordinator.credentials.coordinator
            for peer, endpoint in candidates(self._membership.run_view, endpoints, *others):
                if self._trains or len(tried) == MOST_NEIGHBOURS:
                    return
                if peer not in tried:
                    tried.add(peer)
                    await self._measure(peer, endpoint)
            await asyncio.sleep(jittered(pause))

    async def _measure(self, peer: PeerId, endpoint: str) -> None:
        try:
            async with self._open_probe(endpoint, peer) as probe:
                figures = await probe.figures(_NEIGHBOUR_SECONDS, self._membership.estimates.line)
        except HetnodeError as error:
            log.info("the way to peer %s was not measured: %s", peer, error.cause)
            return
        self._measured[peer] = endpoint
        self._membership.estimates.probed(peer, figures.round_trip, figures.uplink, figures.downlink)
        log.info("the way to peer %s: %s", peer, describe_connection(figures))

    async def _echo(self) -> None:
        """Measure the round trips again. A peer that does not answer keeps its former value."""
        estimates = self._membership.estimates
        try:
            async with self._coordinator.probe() as probe:
                round_trip = await probe.round_trip()
            estimates.capacity = replace(estimates.capacity, round_trip=round_trip)  # as it is by now
        except HetnodeError as error:
            log.debug("no echo from the coordinator: %s", error.cause)
        for peer, endpoint in self._measured.items():
            try:
                async with self._open_probe(endpoint, peer) as probe:
                    estimates.echoed(peer, await probe.round_trip())
            except HetnodeError as error:
                log.debug("no echo from peer %s: %s", peer, error.cause)

    @property
    def _trains(self) -> bool:
        return self._membership.run_view.trains(self._me)
