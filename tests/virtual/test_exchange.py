"""What becomes of the payloads of an exchange when its members fail, over the virtual network.

What every transport does is in tests/node/exchange/test_contract.py.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from node.exchange.payload_service import PayloadService
from protocol.trust.envelope import sign_descriptor
from protocol.types import ExchangeGroup, MemberLine
from tests.builders import Keyed
from tests.support.fault_script import Action, Moment
from tests.support.faults import FaultPlan
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


async def all_exchange(machines: Machines, names: str, group: ExchangeGroup) -> list[tuple[set[str], int]]:
    """What :func:`exchange` gives on each of these machines."""
    each = (machines.on(name, exchange(machines, name, group)) for name in names)
    return list(await asyncio.gather(*each))


HOME, STRONG = MemberLine(10_000, 1_000_000, True), MemberLine(1_000_000, 1_000_000, True)


def helped_by_c(machines: Machines, round_number: int = 1) -> ExchangeGroup:
    """A group in which the line of c passes on what a and b send."""
    group = group_of(machines, A, B, C, round_number=round_number)
    lines = tuple(STRONG if each.owner == C.peer else HOME for each in group.descriptors)
    return replace(group, lines=lines)


FAULTS = [
    pytest.param("a", Action.KILL, 1, False, {B, C}, id="without a peer that is killed while it sends"),
    pytest.param("a", Action.CORRUPT, 1, False, {A, B, C}, id="what arrives corrupt comes from another"),
    *(
        # It never sends its own payload, and the others have each other's.
        pytest.param("c", action, 100, True, {A, B}, id=f"a helper fails: {action}")
        for action in (Action.KILL, Action.CORRUPT, Action.DROP)
    ),
]


@pytest.mark.parametrize(("faulty", "action", "times", "has_helper", "held"), FAULTS)
def test_the_others_finish_an_exchange_with_a_faulty_peer(
    simulate: Simulate,
    plan: FaultPlan,
    faulty: str,
    action: Action,
    times: int,
    has_helper: bool,
    held: set[Keyed],
) -> None:
    plan.fail_at(faulty, 0, 1, Moment.SENDING, action, times=times)

    async def scenario(machines: Machines) -> None:
        machines.plan(faulty, plan)
        group = helped_by_c(machines) if has_helper else group_of(machines, A, B, C)
        machines.on(faulty, exchange(machines, faulty, group))
        others = "".join(name for name in NAMES if name != faulty)
        expected = {each.peer for each in held}
        assert [found for found, _ in await all_exchange(machines, others, group)] == [expected] * 2

    simulate(scenario)
    plan.assert_all_fired()


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
        found = await all_exchange(machines, "abc", helped_by_c(machines))
        assert found == [({A.peer, B.peer, C.peer}, 0)] * 3

    simulate(scenario)
    assert asked.count((A.peer, A.peer)) == asked.count((B.peer, B.peer)) == 1
    assert (C.peer, A.peer) in asked
    assert (C.peer, B.peer) in asked


@pytest.mark.parametrize("is_reached", [True, False])
def test_a_helper_that_takes_no_part_or_never_answers_is_replaced_by_the_owner(
    simulate: Simulate, is_reached: bool
) -> None:
    async def scenario(machines: Machines) -> None:
        await machines.on("c", machines.transport("c"))  # it answers, and gets no payload
        if not is_reached:
            machines.network.isolate("c")
        found = await all_exchange(machines, "ab", helped_by_c(machines))
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
