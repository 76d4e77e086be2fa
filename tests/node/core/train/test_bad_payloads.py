"""Bad payloads in real rounds: real processes of hivemind and workers, a real coordinator, one bad peer.

Two honest replicas run the node's own exchange, each with its worker. The third, the bad one, says and sends
what it likes. Whatever that is, the round of the honest ones is committed without it and their anchors agree.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import pytest_asyncio

from coordinator.membership import strikes
from node.core.train.exchange_round import RoundExchange, RoundOutcome
from node.core.train.link_snapshots import LinkSnapshots
from node.core.train.member_anchors import MemberAnchors
from node.core.train.round_gates import RoundGates
from node.core.train.services import Services
from node.exchange.hive.transport import HiveTransport
from node.exchange.transport import Entry, ServedStages
from node.ipc.channel import start_child
from node.ipc.worker_calls import Apply, Backward, BeginRound, Build, Digests, Forward, Propose
from node.ipc.worker_client import WorkerClient
from node.net.coordinator_client import CoordinatorClient
from node.net.directory import Directory
from node.net.link_server import LinkServer
from node.net.membership import Membership
from node.security.identity import Identity, open_identity
from protocol.errors import ErrorCode, HetnodeError
from protocol.group.peers import PeerRecord
from protocol.run_files.resolve import resolve
from protocol.trust.envelope import sign_descriptor
from protocol.trust.reachability import Addresses
from protocol.types import (
    PROTOCOL_VERSION,
    Capacity,
    Committed,
    Decision,
    Part,
    PayloadDescriptor,
    PeerId,
    Plan,
    Role,
    StageRange,
)
from tests.support.certificates import enrolled
from tests.support.coordinator_process import COORDINATOR, Running, running
from tests.support.hive_nodes import start_transport

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.swarm]

SPEC = resolve(
    "nano",
    overrides={
        "rounds": 12,
        "swarm.stages": 1,
        "swarm.replicas": 3,
        "swarm.pipelines": 0,
        "timing.match_window": 20.0,
        "timing.fetch": 4.0,
        "timing.lost_after": 600.0,  # no peer sends heartbeats here
    },
)
PATIENT = 40.0
CPU = Capacity("cpu", 2**30, 1)


@dataclass
class Peer:
    """What every replica has: its keys, its place at the coordinator, and its hivemind processes."""

    identity: Identity
    coordinator: CoordinatorClient
    transport: HiveTransport


@dataclass
class Honest(Peer):
    exchange: RoundExchange
    worker: WorkerClient


@dataclass
class Round:
    """The peers, and the round that comes next."""

    plan: Plan
    honest: tuple[Honest, Honest]
    bad: Peer
    good_payload: bytes
    codec: str
    run_id: str
    number: int = 1
    payloads: dict[int, PayloadDescriptor] = field(default_factory=dict)

    async def run(self, misbehave: Callable[[], object]) -> Decision:
        """One round of the honest two beside whatever the bad one does. Returns its decision."""
        number, gates = self.number, [RoundGates([0]) for _ in self.honest]
        for each in gates:
            each.trained.set()  # no inner step overlaps
        honest = zip(self.honest, gates, strict=True)
        async with asyncio.timeout(PATIENT):
            *outcomes, _ = await asyncio.gather(
                *(peer.exchange.contribute(self.plan, number, 1.0, each) for peer, each in honest),
                misbehave(),
            )
        self.number += 1
        assert all(isinstance(outcome, RoundOutcome) for outcome in outcomes)
        first, second = [await peer.worker.call(Digests()) for peer in self.honest]
        assert first == second
        decision = await self.honest[0].coordinator.await_decision(0, number, PATIENT)
        assert isinstance(decision, Committed)
        return decision

    async def describe(self, payload: bytes, **changes: object) -> PayloadDescriptor:
        _, digest = (await self.honest[0].worker.call(Digests()))[0, Part.STAGE]
        descriptor = PayloadDescriptor(
            run=self.run_id,
            stage=0,
            round_number=self.number,
            owner=self.bad.identity.peer,
            anchor_digest=digest,
            codec=self.codec,
            weight=1.0,
            nbytes=len(payload),
            sha256=hashlib.sha256(payload).hexdigest(),
            epoch=self.plan.epoch,
        )
        return sign_descriptor(replace(descriptor, **changes), self.bad.identity.sign)

    async def contribute(self, announced: bytes, served: bytes) -> None:
        """The part of the bad peer in a round: that of any peer, with other bytes."""
        descriptor, bad = await self.describe(announced), self.bad
        group = await bad.coordinator.match(descriptor, PATIENT)
        gathered = await bad.transport.exchange(
            served, descriptor, group, expected=3, deadline=SPEC.timing.fetch
        )
        await bad.coordinator.report(0, descriptor.round_number, gathered.held, (), PATIENT)

    async def is_refused(self, descriptor: PayloadDescriptor, code: ErrorCode) -> None:
        """The bad one offers `descriptor`, is refused, and then lets the others go on."""
        with pytest.raises(HetnodeError) as refusal:
            await self.bad.coordinator.match(descriptor, PATIENT)
        assert refusal.value.code is code
        await self.bad.coordinator.await_decision(0, self.number, PATIENT)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rounds(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Round]:
    folder = tmp_path_factory.mktemp("bad-payloads")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strikes, "STRIKES_TO_QUARANTINE", 100)  # one bad peer goes through all of it
        async with AsyncExitStack() as stack:
            coordinator = await stack.enter_async_context(running(SPEC, folder / "coordinator"))
            yield await _start(folder, coordinator, stack)


async def _start(folder: Path, coordinator: Running, stack: AsyncExitStack) -> Round:
    identities = [open_identity(folder / f"{name}.key") for name in ("alice", "bob", "mallory")]
    workers = [await _worker(stack) for _ in range(2)]
    builds = [asyncio.create_task(worker.call(Build(SPEC, StageRange(0, 1)))) for worker in workers]
    peers: list[Peer] = []
    for identity in identities:
        credentials = enrolled(identity, coordinator.run, COORDINATOR.peer, coordinator.authority)
        client = CoordinatorClient(replace(credentials, api=coordinator.address), identity)
        stack.push_async_callback(client.close)
        await client.join(Role.REPLICA, CPU, Addresses(dht="127.0.0.1:9"), SPEC.hash, PATIENT)
        entry = Entry(
            coordinator.run,
            credentials.certificate_file,
            credentials.authority_file,
            peers[0].transport.addresses if peers else (),
        )
        transport = await start_transport(identity, entry)
        stack.push_async_callback(transport.close)
        peers.append(Peer(identity, client, transport))
    built = [await build for build in builds]
    capacity = built[0].capacities[0]
    for peer in peers:
        await peer.transport.admit([identity.peer for identity in identities])
        home = folder / peer.identity.path.stem
        # Where nothing can be written, a payload is in memory, and is sent without a look at its bytes.
        payloads = Path("/dev/null") if peer is peers[2] else home
        hosted = ServedStages({0: capacity}, payloads / "payloads", home / "checkpoints", 10)
        await peer.transport.host_stages(hosted)
    plan = await anext(news.plan async for news in peers[0].coordinator.watch() if news.plan)
    honest = []
    for peer, worker, stage_info in zip(peers, workers, built, strict=False):
        await _train(worker, len(honest))
        membership = await _membership(peer, stack)
        record = PeerRecord(peer.identity.peer, PROTOCOL_VERSION, Role.REPLICA, CPU, "", stages=None)
        services = Services(
            coordinator.run,
            SPEC,
            peer.identity,
            worker,
            peer.transport,
            peer.coordinator,
            LinkServer(lambda client=peer.coordinator: client.credentials.tls),
            membership,
            Directory(peer.transport, record),
        )
        anchors = MemberAnchors(services, StageRange(0, 1), stage_info, folder, _no_snapshots)
        await anchors.refresh()
        exchange = RoundExchange(services, anchors)
        honest.append(Honest(peer.identity, peer.coordinator, peer.transport, exchange, worker))
    stray = await _worker(stack)
    await stray.call(Build(SPEC, StageRange(0, 1)))
    await _train(stray, len(honest))
    payload = await stray.call(Propose(0))
    return Round(plan, (honest[0], honest[1]), peers[2], payload, built[0].payloads[0].codec, coordinator.run)


async def _membership(peer: Peer, stack: AsyncExitStack) -> Membership:
    """As a node keeps it."""

    async def join() -> None:
        raise AssertionError("no peer is lost here")

    membership = Membership(peer.coordinator, join, SPEC.timing.heartbeat)
    keeping = asyncio.create_task(membership.keep())
    stack.callback(keeping.cancel)
    await membership.until(lambda run_view: run_view.newest)
    return membership


async def _worker(stack: AsyncExitStack) -> WorkerClient:
    threads = {"HETNODE_THREADS": "1", "OMP_NUM_THREADS": "1"}
    child = await start_child(
        "node.worker.process", name="worker", died=ErrorCode.WORKER_DIED, environment=threads
    )
    stack.push_async_callback(child.close, 3.0)
    return WorkerClient(child)


async def _train(worker: WorkerClient, replica: int) -> None:
    """One inner step, so that there is something to send."""
    size = SPEC.samples_per_round()
    await worker.call(BeginRound(1, range(replica * size, (replica + 1) * size)))
    for microbatch in range(SPEC.inner.microbatches):
        await worker.call(Forward(0, microbatch, None))
        await worker.call(Backward(microbatch, None))
    await worker.call(Apply(0, 1.0))


def honest_owners(rounds: Round) -> list[PeerId]:
    return sorted(peer.identity.peer for peer in rounds.honest)


def owners(decision: Decision) -> list[PeerId]:
    return [entry.descriptor.owner for entry in decision.entries]


HEADER = 16


def with_scale(payload: bytes, low: float, high: float) -> bytes:
    """The payload with other magnitudes in its first tensor, whose two stand right behind the header."""
    return payload[:HEADER] + struct.pack("<2f", low, high) + payload[HEADER + 8 :]


CONTENTS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "a scale that is not a number": (lambda good: with_scale(good, 1e-3, float("nan")), "not finite"),
    "an infinite scale": (lambda good: with_scale(good, 1e-3, float("inf")), "not finite"),
    "a million times the norm": (lambda good: with_scale(good, 1e3, 1e6), "median of the group"),
    "another codec": (lambda good: b"hnpg" + bytes(len(good) - 4), "header"),
    "a pickle": (lambda good: b"\x80\x04" + good[2:], "header"),
}


@pytest.mark.parametrize("kind", CONTENTS)
async def test_a_payload_with_bad_content_is_left_out(
    rounds: Round, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    change, why = CONTENTS[kind]
    bad = change(rounds.good_payload)
    assert len(bad) == len(rounds.good_payload)
    decision = await rounds.run(lambda: rounds.contribute(bad, bad))
    assert owners(decision) == honest_owners(rounds)
    assert_struck(caplog, rounds.bad.identity.peer, why)


@pytest.mark.parametrize("kind", ["bit-flipped", "truncated", "oversized"])
async def test_other_bytes_than_those_announced_are_left_out(
    rounds: Round, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    good = rounds.good_payload
    served = {
        "bit-flipped": good[:-1] + bytes([good[-1] ^ 1]),
        "truncated": good[:-1],
        "oversized": good + b"\0",
    }[kind]
    decision = await rounds.run(lambda: rounds.contribute(good, served))
    assert owners(decision) == honest_owners(rounds)
    if kind != "truncated":  # which a bad connection may do as well
        assert_struck(caplog, rounds.bad.identity.peer, {"bit-flipped": "hash", "oversized": "chunk"}[kind])


async def test_an_envelope_that_promises_gigabytes_or_another_weight_is_refused_unread(
    rounds: Round, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for changes, why in (({"nbytes": 8 << 30}, "bytes, at most"), ({"weight": 1000.0}, "it may have")):
        descriptor = await rounds.describe(rounds.good_payload, **changes)
        decision = await rounds.run(lambda d=descriptor: rounds.is_refused(d, ErrorCode.BAD_REQUEST))
        assert owners(decision) == honest_owners(rounds)
        assert_struck(caplog, rounds.bad.identity.peer, why)


async def test_after_all_that_a_good_payload_counts(rounds: Round) -> None:
    good = rounds.good_payload
    decision = await rounds.run(lambda: rounds.contribute(good, good))
    assert owners(decision) == sorted([*honest_owners(rounds), rounds.bad.identity.peer])


def assert_struck(caplog: pytest.LogCaptureFixture, peer: PeerId, why: str) -> None:
    """The coordinator's log names the peer and the reason."""
    strikes_told = [message for message in caplog.messages if "STRIKE" in message and peer[-8:] in message]
    assert any(why in message for message in strikes_told), caplog.messages


def _no_snapshots(*_: object) -> LinkSnapshots:
    raise AssertionError("the links of this run use none")
