"""A process of hivemind dies while a run trains: it is started again, and the run loses nothing."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Set
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from coordinator.base.phrases import short
from node.command_runner import VERBOSE
from node.exchange.transport import Entry
from node.net.coordinator_client import CoordinatorClient
from node.net.enrollment import enroll
from node.security.credentials import RunCredentials
from node.security.identity import Identity, open_identity
from protocol.errors import HetnodeError
from protocol.run_files.resolve import resolve
from protocol.spec.run import RunSpec
from protocol.trust.invite import decode
from protocol.types import Role
from tests.support.hive_nodes import start_transport
from tests.support.processes import COORDINATOR, ProcessSwarm
from tests.support.waiting import is_alive

# Forty rounds, of which some are held open: minutes on a busy machine.
pytestmark = [pytest.mark.swarm, pytest.mark.hostile, pytest.mark.timeout(1800)]

FULL = {"a": Role.REPLICA, "b": Role.REPLICA}
LATE = "late"
KINDS = ("host", "DHT", "p2pd")
SECONDS = 240.0
AGAIN = "hivemind's processes run again"


def spec_of(rounds: int) -> RunSpec:
    return resolve(
        "nano",
        overrides={
            "rounds": rounds,
            "inner.steps": 5,
            "swarm.replicas": len(FULL),
            "swarm.pipelines": 0,
            "recovery.keep_rounds": rounds + 1,
            # The coordinator waits long enough for the suspended replica, and a busy machine loses no node.
            "timing.straggler": 1e6,
            "timing.lost_after": 60.0,
        },
    )


@contextmanager
def round_held_open(swarm: ProcessSwarm, by: str) -> Iterator[None]:
    """Suspend the worker of the node `by`: the present round or the next one stays open."""
    worker = swarm.worker_of(by)
    worker.suspend()
    try:
        yield
    finally:
        worker.resume()
        assert swarm.round_number < swarm.spec.rounds, "the run was over before the fault"


def has_offered(swarm: ProcessSwarm, name: str, round_number: int) -> bool:
    offer = rf"{re.escape(short(swarm.peer(name)))} offers \d+ bytes for stage \d+, round {round_number}$"
    return re.search(offer, swarm.log(COORDINATOR), re.MULTILINE) is not None


def kill(swarm: ProcessSwarm, name: str, kind: str) -> list[psutil.Process]:
    """SIGKILL the process of that kind. Returns all processes that must end with it."""
    found = swarm.hivemind_of(name)
    family = [found["host"], *found["host"].children(recursive=True)]
    swarm.kill_below(name, found[kind])
    return family


def wait_started_again(swarm: ProcessSwarm, name: str, times: int, former: list[psutil.Process]) -> None:
    swarm.wait_until(lambda: swarm.log(name).count(AGAIN) == times, SECONDS, f"start {times} of {name}")
    now = swarm.hivemind_of(name)
    assert set(now) == set(KINDS)
    assert not set(now.values()) & set(former)
    psutil.wait_procs(former, timeout=10)
    left = [each for each in former if is_alive(each)]
    assert not left, f"they outlived their host: {left}"


class Newcomer:
    """A peer with a certificate that knows only the first peer of the DHT, by its address at first."""

    def __init__(self, swarm: ProcessSwarm, folder: Path) -> None:
        self._swarm = swarm
        self._identity: Identity = open_identity(folder / "newcomer.key")
        self._credentials: RunCredentials = asyncio.run(
            enroll(decode(swarm.invite()), self._identity, SECONDS)
        )
        port = (swarm.run / "dht-port").read_text()
        self._first = f"/ip4/127.0.0.1/tcp/{port}/p2p/{self._credentials.coordinator}"

    def wait_for_records_of(self, peers: Set[str]) -> None:
        """Wait until the DHT shows the records of all `peers`. TimeoutError if it does not."""
        asyncio.run(self._find(peers))

    async def _find(self, peers: Set[str]) -> None:
        client = CoordinatorClient(self._credentials, self._identity)
        with suppress(HetnodeError):  # it has not joined; but now the coordinator's DHT peer knows it
            await client.heartbeat(0, 0)
        await client.close()
        entry = Entry(
            self._swarm.run_id,
            self._credentials.certificate_file,
            self._credentials.authority_file,
            (self._first,),
            client_mode=True,
        )
        hivemind = await start_transport(self._identity, entry)
        try:
            async with asyncio.timeout(SECONDS):
                while not peers <= (await hivemind.lookup()).keys():  # noqa: ASYNC110 - no event tells of it
                    await asyncio.sleep(1.0)
        finally:
            await hivemind.close()


def test_a_dead_process_of_hivemind_starts_again_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VERBOSE, "1")  # the coordinator says who offers a payload
    with ProcessSwarm(spec_of(rounds=40), tmp_path, FULL) as swarm:
        swarm.start_coordinator()
        for name in FULL:
            swarm.start_node(name)
        swarm.wait_round(1, SECONDS)
        newcomer = Newcomer(swarm, tmp_path)

        with round_held_open(swarm, by="a"):
            for times, kind in enumerate(KINDS, start=1):
                wait_started_again(swarm, COORDINATOR, times, kill(swarm, COORDINATOR, kind))
            before = swarm.round_number
            swarm.members[LATE] = Role.REPLICA
            swarm.start_node(LATE)
            swarm.wait_log(LATE, "joined run", SECONDS)
            newcomer.wait_for_records_of({swarm.peer(name) for name in swarm.members})
        swarm.wait_round(before + 2, SECONDS)
        swarm.wait_until(lambda: bool(swarm.contributions(LATE)), SECONDS, "a payload of the late node")

        for times, kind in enumerate(KINDS, start=1):
            with round_held_open(swarm, by="a"):
                opened = swarm.round_number + 1
                swarm.wait_until(
                    lambda opened=opened: has_offered(swarm, "b", opened),
                    SECONDS,
                    f"an offer of b for round {opened}",
                )
                family = kill(swarm, "b", kind)
            # The exchange of this round begins while the processes of b are dead.
            wait_started_again(swarm, "b", times, family)
            done = swarm.round_number
            swarm.wait_until(
                lambda done=done: max(swarm.contributions("b")) > done, SECONDS, "a payload of b afterwards"
            )

        swarm.wait_over(SECONDS)
        swarm.wait_until(lambda: not swarm.is_running(COORDINATOR), SECONDS, "the end of the coordinator")
        assert swarm.status(COORDINATOR) == 0
        assert [swarm.times_lost(name) for name in swarm.members] == [0, 0, 0]
        assert swarm.restarts == 0
        assert all(swarm.spec.rounds in swarm.contributions(name) for name in swarm.members)
        swarm.assert_all_agree()
