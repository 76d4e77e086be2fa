"""Payloads in an exchange over the virtual network, and what becomes of them when its members fail."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from node.exchange.payload_service import PayloadService
from protocol.trust.envelope import sign_descriptor
from protocol.types import ExchangeGroup, ManifestEntry, MemberLine
from tests.builders import Keyed
from tests.support.fault_script import Action, Moment
from tests.support.faults import FaultPlan
from tests.virtual.loop import VirtualProcess
from tests.virtual.machines import NAMES, A, B, C, Machines, Simulate


def payload_of(member: Keyed, round_number: int = 1) -> bytes:
    return f"{member.number} 0 {round_number}".encode()


def group_of(machines: Machines, *members: Keyed, round_number: int = 1) -> ExchangeGroup:
    described = [descriptor_of(machines, member, round_number) for member in members]
    described.sort(key=lambda each: each.owner)
    return ExchangeGroup("g", tuple(described))


def descriptor_of(machines: Machines, member: Keyed, round_number: int = 1) -> Any:
    unsigned = member.payload(machines.spec, 0, round_number, run=machines.run_id)
    return sign_descriptor(replace(unsigned, nbytes=len(payload_of(member)), signature=b""), member.sign)


async def exchange(
    machines: Machines, name: str, group: ExchangeGroup, seconds: float = 10
) -> tuple[set[str], int]:
    """The owners of the payloads that the machine holds afterwards, and the number of its rejections."""
    member = NAMES[name]
    transport = await machines.transport(name)
    gathered = await transport.exchange(
        payload_of(member), descriptor_of(machines, member), group, expected=3, deadline=seconds
    )
    return {each.owner for each in gathered.held}, len(gathered.rejected)


def test_an_exchange_gives_all_payloads_to_all_members(simulate: Simulate) -> None:
    async def scenario(machines: Machines) -> None:
        group = group_of(machines, A, B, C)
        found = await asyncio.gather(*(machines.on(name, exchange(machines, name, group)) for name in NAMES))
        assert found == [({A.peer, B.peer, C.peer}, 0)] * 3

    simulate(scenario)


def test_the_others_finish_an_exchange_without_a_peer_that_is_killed_while_it_sends(
    simulate: Simulate, tmp_path: Path
) -> None:
    plan = FaultPlan(tmp_path / "faults").fail_at("a", 0, 1, Moment.SENDING, Action.KILL)
    plan.folder.mkdir()

    async def scenario(machines: Machines) -> None:
        machines.plan("a", plan)
        group = group_of(machines, A, B, C)
        machines.on("a", exchange(machines, "a", group))
        found = await asyncio.gather(*(machines.on(name, exchange(machines, name, group)) for name in "bc"))
        assert found == [({B.peer, C.peer}, 0)] * 2

    simulate(scenario)
    plan.assert_all_fired()


def test_a_payload_that_arrives_corrupt_is_fetched_from_another_peer(
    simulate: Simulate, tmp_path: Path
) -> None:
    plan = FaultPlan(tmp_path / "faults").fail_at("a", 0, 1, Moment.SENDING, Action.CORRUPT)
    plan.folder.mkdir()

    async def scenario(machines: Machines) -> None:
        machines.plan("a", plan)
        group = group_of(machines, A, B, C)
        found = await asyncio.gather(*(machines.on(name, exchange(machines, name, group)) for name in NAMES))
        assert [held for held, _ in found] == [{A.peer, B.peer, C.peer}] * 3

    simulate(scenario)
    plan.assert_all_fired()


HOME, STRONG = MemberLine(10_000, 1_000_000, True), MemberLine(1_000_000, 1_000_000, True)


def helped_by_c(machines: Machines, round_number: int = 1) -> ExchangeGroup:
    """A group in which the line of c passes on what a and b send."""
    group = group_of(machines, A, B, C, round_number=round_number)
    lines = tuple(STRONG if each.owner == C.peer else HOME for each in group.descriptors)
    return replace(group, lines=lines)


def test_a_payload_passes_through_a_helper_where_its_owner_sends_it_once(
    simulate: Simulate, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str]] = []
    fetch = PayloadService.fetch

    async def recorded(self: Any, holder: str, descriptor: Any, *more: Any) -> bytes:
        asked.append((holder, descriptor.owner))
        return await fetch(self, holder, descriptor, *more)

    monkeypatch.setattr(PayloadService, "fetch", recorded)

    async def scenario(machines: Machines) -> None:
        group = helped_by_c(machines)
        found = await asyncio.gather(*(machines.on(name, exchange(machines, name, group)) for name in NAMES))
        assert found == [({A.peer, B.peer, C.peer}, 0)] * 3

    simulate(scenario)
    assert asked.count((A.peer, A.peer)) == asked.count((B.peer, B.peer)) == 1
    assert (C.peer, A.peer) in asked
    assert (C.peer, B.peer) in asked


@pytest.mark.parametrize("action", [Action.KILL, Action.CORRUPT, Action.DROP])
def test_the_others_have_each_others_payloads_when_their_helper_fails(
    simulate: Simulate, tmp_path: Path, action: Action
) -> None:
    plan = FaultPlan(tmp_path / "faults").fail_at("c", 0, 1, Moment.SENDING, action, times=100)
    plan.folder.mkdir()

    async def scenario(machines: Machines) -> None:
        machines.plan("c", plan)
        group = helped_by_c(machines)
        machines.on("c", exchange(machines, "c", group))
        found = await asyncio.gather(*(machines.on(name, exchange(machines, name, group)) for name in "ab"))
        assert [held for held, _ in found] == [{A.peer, B.peer}] * 2, "c never sends its own payload"

    simulate(scenario)
    plan.assert_all_fired()


def test_a_helper_that_takes_no_part_costs_half_of_the_time(simulate: Simulate) -> None:
    async def scenario(machines: Machines) -> None:
        group = helped_by_c(machines)
        await machines.on("c", machines.transport("c"))  # it answers, and gets no payload
        found = await asyncio.gather(*(machines.on(name, exchange(machines, name, group)) for name in "ab"))
        assert [held for held, _ in found] == [{A.peer, B.peer}] * 2

    simulate(scenario)


def test_a_helper_that_fails_is_left_out_of_the_next_rounds(
    simulate: Simulate, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, str, float]] = []
    fetch = PayloadService.fetch

    async def recorded(self: Any, holder: str, descriptor: Any, *more: Any) -> bytes:
        if (self._me, descriptor.owner) == (B.peer, A.peer):
            asked.append((descriptor.round_number, holder, asyncio.get_running_loop().time() - began[0]))
        return await fetch(self, holder, descriptor, *more)

    monkeypatch.setattr(PayloadService, "fetch", recorded)
    began = [0.0]

    async def scenario(machines: Machines) -> None:
        await machines.on("c", machines.transport("c"))  # it answers, and gets no payload
        transports = {name: await machines.on(name, machines.transport(name)) for name in "ab"}
        for number in (1, 2):
            began[0] = asyncio.get_running_loop().time()
            group = helped_by_c(machines, number)

            async def one(name: str, group: ExchangeGroup = group, number: int = number) -> int:
                own = descriptor_of(machines, NAMES[name], number)
                found = await transports[name].exchange(
                    payload_of(NAMES[name], number), own, group, expected=3, deadline=1000
                )
                return len(found.held)

            assert await asyncio.gather(*(machines.on(name, one(name)) for name in "ab")) == [2, 2]

    simulate(scenario)
    first, second = ([each[1:] for each in asked if each[0] == number] for number in (1, 2))
    assert first[0][0] == C.peer
    assert first[-1][0] == A.peer
    assert 5 <= first[-1][1] < 10, "not half of the time to gather"
    assert [holder for holder, _ in second] == [A.peer]
    assert second[0][1] < 1


def test_a_helper_that_never_answers_is_replaced_by_the_owner(simulate: Simulate) -> None:
    async def scenario(machines: Machines) -> None:
        group = helped_by_c(machines)
        await machines.on("c", machines.transport("c"))
        machines.network.isolate("c")
        found = await asyncio.gather(*(machines.on(name, exchange(machines, name, group)) for name in "ab"))
        assert [held for held, _ in found] == [{A.peer, B.peer}] * 2

    simulate(scenario)


def test_a_restarted_node_serves_its_former_payloads(simulate: Simulate) -> None:
    async def scenario(machines: Machines) -> None:
        await machines.on("a", exchange(machines, "a", group_of(machines, A), 1))
        machines.kill("a")
        machines.processes["a"] = VirtualProcess("a")
        await machines.on("a", machines.transport("a"))

        async def fetch() -> bytes:
            entry = ManifestEntry(descriptor_of(machines, A), (C.peer, A.peer))
            found = await (await machines.transport("b")).fetch_payload(entry, 10)
            return found.read(entry.descriptor.nbytes)

        got = await machines.on("b", fetch())
        assert got == payload_of(A)
        assert hashlib.sha256(got).hexdigest() == descriptor_of(machines, A).sha256

    simulate(scenario)


def test_peers_find_a_group_without_the_coordinator(simulate: Simulate) -> None:
    async def scenario(machines: Machines) -> None:
        held = await asyncio.gather(*(machines.on(name, search(machines, name)) for name in NAMES))
        assert held == [3, 3, 3]

    async def search(machines: Machines, name: str) -> int:
        member, transport = NAMES[name], await machines.transport(name)
        gathered = await transport.exchange(
            payload_of(member), descriptor_of(machines, member), None, expected=3, deadline=10
        )
        return len(gathered.held)

    simulate(scenario)
