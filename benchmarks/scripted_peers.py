"""A process of benchmarks.coordinator: many peers of a run, without models, payloads or links.

They make the calls that nodes make in a round, in the same order, over connections and with certificates of
their own. Their payloads do not exist: each peer reports all payloads of its group as held.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from benchmarks.processes import answer_commands
from coordinator.authority import open_authority
from coordinator.run.state.records import Assignment
from node.net.attestations import Attestations
from node.net.coordinator_channel import CoordinatorChannel
from node.net.group_reports import GroupReports
from node.net.measurements import Measurements
from node.security.credentials import Credentials, new_tls_key
from protocol.pb import hetnode_pb2 as pb
from protocol.spec.run import RunSpec
from protocol.status import Measurement
from protocol.trust.tls import tls_key_from_der
from protocol.types import (
    PROTOCOL_VERSION,
    Capacity,
    Committed,
    Decision,
    Estimates,
    ExchangeGroup,
    LinkEstimate,
    Part,
    PeerId,
    Plan,
    Role,
)
from protocol.wire.convert.payloads import decision_from_pb, descriptor_to_pb
from protocol.wire.convert.plans import capacity_to_pb, estimates_to_pb, plan_from_pb
from protocol.wire.groups import unpack
from protocol.wire.plan_pieces import plan_from_pieces
from protocol.wire.status import measurement_to_pb
from tests.builders import Keyed, anchor_of, keyed

_JOINS_AT_ONCE = 16
_CALL_SECONDS = 120.0
_CAPACITY = Capacity("cuda", 2**36, 8, 1e8, 1e8, 1e8, 0.001)
_LOSS = 3.0
_KEPT = 16
T = TypeVar("T")


class Latencies:
    """How long calls took, over all peers of this process; times are those of one clock of the machine.

    A call that waits for others counts from the last call that it waits for, which may be another process's:
    so each (kind, stage, round) has the time of its last call and those of all answers.
    """

    def __init__(self) -> None:
        self._plain: defaultdict[str, Counter[int]] = defaultdict(Counter)
        self._asked: dict[str, float] = {}
        self._answered: defaultdict[str, list[float]] = defaultdict(list)

    def note(self, kind: str, seconds: float) -> None:
        self._plain[kind][round(1000 * seconds)] += 1

    def ask(self, kind: str, stage: int, round_number: int) -> None:
        self._asked[f"{kind} {stage} {round_number}"] = time.monotonic()

    def answer(self, kind: str, stage: int, round_number: int) -> None:
        self._answered[f"{kind} {stage} {round_number}"].append(time.monotonic())

    def write(self, path: Path) -> None:
        path.write_text(json.dumps({"plain": self._plain, "asked": self._asked, "answered": self._answered}))


class ScriptedPeer:
    """One peer. `phase`: seconds of its inner phases. `gathering`: over how many seconds all peers report."""

    def __init__(
        self,
        key: Keyed,
        role: Role,
        tls: Credentials,
        address: str,
        crowd: ScriptedPeers,
        phase: float,
        gathering: float,
    ) -> None:
        self.key, self.role, self._tls, self._crowd = key, role, tls, crowd
        self._phase, self._gathering = phase, gathering
        self._channel = CoordinatorChannel(address, tls)
        self._reports = GroupReports(key.peer)
        self._attestations = Attestations(self._attest, lambda: crowd.members)
        self._measurements = Measurements(self._measure, lambda: crowd.members)
        self._anchor_round: dict[int, int] = {}
        self._round = 0
        self._heartbeat = crowd.spec.timing.heartbeat
        self._estimates: Estimates | None = None
        self._planned = asyncio.Event()

    async def call(self, method: str, /, plain: bool = True, **fields: Any) -> Any:
        """The answer of the coordinator; the time of a `plain` call is noted."""
        return await self._send(method, getattr(pb, f"{method}Request")(peer=self.key.peer, **fields), plain)

    async def _send(self, method: str, message: Any, plain: bool = True) -> Any:
        began = time.monotonic()
        async with self._channel.call() as stub:
            reply = await getattr(stub, method)(message, timeout=_CALL_SECONDS, wait_for_ready=True)
        if plain:
            self._crowd.latencies.note(method, time.monotonic() - began)
        return reply

    async def join(self) -> None:
        await self.call(
            "Join",
            protocol_version=PROTOCOL_VERSION,
            role=self.role.value,
            capacity=capacity_to_pb(_CAPACITY),
            endpoint="192.0.2.1:1000",
        )

    async def live(self) -> None:
        """Take part until the run is over."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._watch()), group.create_task(self._send_heartbeats())]
            await self._train()
            for task in tasks:
                task.cancel()
            # Only now: a heartbeat on its way would be that of a peer that has left.
            await asyncio.wait(tasks)
            await self.call("Leave", reason="finished")

    async def close(self) -> None:
        await self._channel.close()

    async def _watch(self) -> None:
        async with self._channel.call() as stub:
            plan = b""
            async for update in stub.Watch(pb.WatchRequest(peer=self.key.peer, changes=True)):
                self._crowd.watched += update.ByteSize()
                if update.signed_plan or update.pieces:
                    plan = update.signed_plan or plan_from_pieces(plan, update.pieces)
                    self._crowd.note_plan(plan)
                    self._planned.set()

    async def _send_heartbeats(self) -> None:
        await asyncio.sleep(random.uniform(0, self._heartbeat))
        while True:
            estimates, self._estimates = self._estimates, None
            changed = None if estimates is None else estimates_to_pb(estimates)
            reply = await self.call("Heartbeat", round=self._round, inner_step=1, estimates=changed)
            interval = max(self._heartbeat, reply.interval)
            await asyncio.sleep(interval * random.uniform(0.75, 1.25))

    async def _train(self) -> None:
        await self._planned.wait()
        stages = self._crowd.assignment(self.key.peer, 1).member.stages
        for stage in {0, *stages}:
            self._add_attestation(stage, 0)
        for round_number in range(1, self._crowd.spec.rounds + 1):
            self._round = round_number
            await asyncio.sleep(self._phase * random.uniform(0.95, 1.05))
            await self._attestations.told()
            assignment = self._crowd.assignment(self.key.peer, self._round)
            async with asyncio.TaskGroup() as group:
                for stage in assignment.member.stages:
                    group.create_task(self._contribute(assignment, stage))
                if 0 not in assignment.member.stages:
                    group.create_task(self._follow_embedding())
            await self._measurements.tell(self._measured(assignment))
            if self._round == 1:
                self._estimates = self._measured_estimates(assignment)
            self._crowd.note_round(self._round)
        await self._measurements.told()
        await self._attestations.told()

    async def _contribute(self, assignment: Assignment, stage: int) -> None:
        number, latencies = self._round, self._crowd.latencies
        payload = self.key.payload(
            self._crowd.spec,
            stage,
            number,
            weight=assignment.replica.weight,
            run=self._crowd.run_id,
            epoch=self._crowd.plan_for(number).epoch,
        )
        latencies.ask("Match", stage, number)
        matched = await self.call("Match", plain=False, descriptor=descriptor_to_pb(payload), packs=True)
        latencies.answer("Match", stage, number)
        group = self._crowd.group_of(matched)
        self._reports.note(payload, group)
        report = self._reports.by_positions(
            pb.ReportRequest(stage=stage, round=number, packs=True), group.descriptors
        )
        assert report is not None, "it holds payloads of its group alone"
        # The payloads of the others arrive.
        await asyncio.sleep(random.uniform(0.5, 0.5 + self._gathering))
        latencies.ask("Report", stage, number)
        reply = await self.call(
            "Report",
            plain=False,
            stage=stage,
            round=number,
            packs=True,
            group=report.group,
            positions=report.positions,
        )
        latencies.answer("Report", stage, number)
        self._check(self._reports.decision_of(reply, stage, number))
        self._add_attestation(stage, number)

    async def _follow_embedding(self) -> None:
        number = self._round
        reply = await self.call("AwaitDecision", plain=False, stage=0, round=number, packs=True)
        self._crowd.latencies.answer("Report", 0, number)
        self._check(self._crowd.decision_of(reply))
        self._add_attestation(0, number)

    @staticmethod
    def _check(decision: Decision) -> None:
        if not isinstance(decision, Committed):
            raise RuntimeError(f"round {decision.round_number} of stage {decision.stage}: {decision.reason}")

    def _add_attestation(self, stage: int, round_number: int) -> None:
        hosts = stage in self._crowd.assignment(self.key.peer, max(1, round_number)).member.stages
        part = Part.STAGE if hosts else Part.EMBEDDING
        self._anchor_round[stage] = round_number
        for each in sorted({part, Part.EMBEDDING} if stage == 0 else {part}):
            self._attestations.add(stage, each)

    async def _attest(self, stage: int, part: Part) -> None:
        number = self._anchor_round[stage]
        digest = anchor_of(stage, number)
        await self.call("Attest", stage=stage, round=number, part=part.value, digest=digest)

    def _measured(self, assignment: Assignment) -> Measurement:
        members = assignment.replica.members
        is_last = assignment.position == len(members) - 1
        return Measurement(
            self.key.peer,
            self._round,
            assignment.replica.index,
            assignment.position,
            train_loss=_LOSS if is_last else 0.0,
            validation_loss=_LOSS if is_last else 0.0,
            tokens=65_536 if is_last else 0,
            inner_seconds=self._phase,
            outer_seconds=3.0,
            payload_bytes=1_000_000,
            complete=is_last,
            steps=10,
            microbatches=4,
            compute_seconds=0.8 * self._phase,
        )

    async def _measure(self, measured: Measurement) -> None:
        await self._send("Measure", measurement_to_pb(measured))

    def _measured_estimates(self, assignment: Assignment) -> Estimates:
        links = tuple(
            LinkEstimate(member.peer, 0.001, 1e8, 1e8)
            for member in assignment.replica.members
            if member.peer != self.key.peer
        )
        capacity = replace(_CAPACITY, flops=_CAPACITY.flops * random.uniform(0.95, 1.05))
        return Estimates(capacity, self._phase / 40, links)


class ScriptedPeers:
    """The peers of this process, and the commands of the benchmark.

    Attributes:
        watched: bytes of the updates that they have received.
    """

    def __init__(self) -> None:
        self.latencies = Latencies()
        self.watched = 0
        self.spec: RunSpec
        self.run_id = ""
        self._plans: dict[bytes, Plan] = {}
        self._groups: dict[bytes, ExchangeGroup] = {}
        self._decisions: dict[bytes, Decision] = {}
        self._members: dict[tuple[int, PeerId], Assignment] = {}
        self._peers: list[ScriptedPeer] = []
        self._lives: list[asyncio.Task[None]] = []
        self._rounds = Counter[int]()

    # Commands

    async def join(
        self,
        spec_json: str,
        folder: str,
        address: str,
        phase: float,
        gathering: float,
        full: list[int],
        stage: list[int],
    ) -> dict[str, Any]:
        """Join with the peers of these numbers. Their certificates come from the authority in `folder`."""
        self.spec = RunSpec.from_json(spec_json)
        authority = open_authority(Path(folder), self.spec.name)
        self.run_id = authority.run_id(self.spec)
        for number, role in [*((n, Role.REPLICA) for n in full), *((n, Role.STAGE) for n in stage)]:
            blank = Credentials(authority.pem, b"", new_tls_key())
            key = keyed(number)
            certificate = authority.for_peer(key.peer, tls_key_from_der(blank.public_key))
            tls = replace(blank, certificate=certificate)
            self._peers.append(ScriptedPeer(key, role, tls, address, self, phase, gathering))
        at_once = asyncio.Semaphore(_JOINS_AT_ONCE)

        async def join(peer: ScriptedPeer) -> None:
            async with at_once:
                await peer.join()
            self._lives.append(asyncio.create_task(peer.live()))

        await asyncio.gather(*map(join, self._peers))
        return {}

    async def until_round(self, round_number: int) -> dict[str, Any]:
        """Wait until all peers have finished this round. Raises the error of one of them."""
        while self._rounds[round_number] < len(self._peers):
            await asyncio.sleep(0.2)
            for life in self._lives:
                if life.done():
                    life.result()
        return {}

    async def results(self, path: str) -> dict[str, Any]:
        """Wait until all peers have left, and write how long their calls took."""
        await asyncio.gather(*self._lives)
        await asyncio.gather(*(peer.close() for peer in self._peers))
        self.latencies.write(Path(path))
        return {"watched": self.watched}

    # What the peers share

    @property
    def members(self) -> int:
        """Of the newest plan."""
        return max(self._plans.values(), key=lambda plan: plan.epoch).size

    def note_plan(self, signed_plan: bytes) -> None:
        """Read a plan once for all peers."""
        digest = hashlib.sha256(signed_plan).digest()
        if digest in self._plans:
            return
        plan = self._plans[digest] = plan_from_pb(pb.Plan.FromString(signed_plan))
        for replica in plan.replicas:
            for position, member in enumerate(replica.members):
                self._members[plan.epoch, member.peer] = Assignment(replica, position)

    def group_of(self, reply: pb.MatchReply) -> ExchangeGroup:
        """The group in an answer, which is read once for all peers."""
        return _kept(self._groups, reply.packed, lambda: GroupReports.group_of(reply))

    def decision_of(self, reply: pb.DecisionReply) -> Decision:
        """As :meth:`group_of`, for the answer to a peer that has no group."""
        return _kept(
            self._decisions,
            reply.packed,
            lambda: decision_from_pb(unpack(pb.DecisionReply, reply.packed)),
        )

    def plan_for(self, round_number: int) -> Plan:
        valid = [plan for plan in self._plans.values() if plan.from_round <= round_number]
        return max(valid, key=lambda plan: plan.epoch)

    def assignment(self, peer: PeerId, round_number: int) -> Assignment:
        return self._members[self.plan_for(round_number).epoch, peer]

    def note_round(self, round_number: int) -> None:
        self._rounds[round_number] += 1


def _kept(known: dict[bytes, T], packed: bytes, read: Callable[[], T]) -> T:
    if packed not in known:
        known[packed] = read()
        if len(known) > _KEPT:
            del known[next(iter(known))]
    return known[packed]


async def _main() -> None:
    await answer_commands(ScriptedPeers())


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_main())
