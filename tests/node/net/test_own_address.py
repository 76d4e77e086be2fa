"""A node notices that its machine has another address, or was suspended, and connects anew."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from ipaddress import ip_interface
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest

from node.net import own_address
from node.net.addresses import ClaimedPorts
from node.net.coordinator_client import CoordinatorClient
from node.net.enrollment import enroll
from node.net.membership import RunView
from node.net.own_address import AddressChange, AddressWatch, SourceWatch
from node.net.sources import AcceptedSources
from node.security.identity import open_identity
from protocol.errors import ErrorCode, HetnodeError
from protocol.trust.reachability import Addresses
from protocol.types import Capacity, PeerId, Role
from tests.builders import spec_of
from tests.support.coordinator_process import running
from tests.virtual.loop import run

OLD, NEW, OTHER = "192.0.2.1", "2001:db8::7", "192.0.2.9"
A, B = PeerId("a"), PeerId("b")
T = TypeVar("T")


@dataclass
class Machine:
    """`towards` is the address towards the coordinator, "" without any network; `slept` in seconds."""

    addresses: list[str] = field(default_factory=lambda: [OLD])
    towards: str = OLD
    slept: float = 0.0


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine()

    async def towards(_: str) -> str:
        if not found.towards:
            raise HetnodeError(ErrorCode.COORDINATOR_UNREACHABLE, "No network.", "Wait.")
        return found.towards

    monkeypatch.setattr(own_address, "interface_addresses", lambda: tuple(map(ip_interface, found.addresses)))
    monkeypatch.setattr(own_address, "local_address_towards", towards)
    monkeypatch.setattr(own_address, "wall_clock", lambda: found.slept + asyncio.get_running_loop().time())
    return found


def changes_after(machine: Machine, *acts: dict[str, object]) -> list[AddressChange]:
    """What is noticed of each act within five seconds."""

    async def main() -> list[AddressChange]:
        watch, noticed = AddressWatch("c:7700", machine.towards), []
        for act in acts:
            for name, value in act.items():
                setattr(machine, name, value)
            try:
                async with asyncio.timeout(5):
                    noticed.append(await watch.change())
            except TimeoutError:
                continue
        return noticed

    return run(main())


def test_another_address_is_noticed_and_cuts_if_the_former_one_is_gone(machine: Machine) -> None:
    moved = {"addresses": [NEW], "towards": NEW}
    (change,) = changes_after(machine, moved)
    assert change == AddressChange(f"this machine is at {NEW} now", is_cut=True, is_here=True)
    (change,) = changes_after(machine, {"addresses": [NEW, OTHER], "towards": OTHER})
    assert not change.is_cut


def test_addresses_that_lead_nowhere_are_no_news(machine: Machine) -> None:
    assert not changes_after(machine, {"addresses": [OLD, OTHER]}, {"addresses": [OLD]})


def test_a_machine_without_network_is_waited_for(machine: Machine) -> None:
    gone, back = {"addresses": [], "towards": ""}, {"addresses": [OLD], "towards": OLD}
    assert not changes_after(machine, gone, back)
    (change,) = changes_after(machine, gone, {"addresses": [NEW], "towards": NEW})
    assert change.is_cut


def test_sleep_cuts_connections_and_is_noticed_once(machine: Machine) -> None:
    (change,) = changes_after(machine, {"slept": 3600.0}, {})
    assert change == AddressChange("this machine was suspended", is_cut=True, is_here=True)
    assert not changes_after(machine, {"slept": 0.0}), "a clock that is set back is no sleep"


def test_the_same_ports_are_claimed_at_the_new_address() -> None:
    ports = ClaimedPorts(OLD, "::", 7711)
    ports.claim(OLD)
    assert ports.addresses == Addresses("", f"{OLD}:7711")
    ports.claim(NEW)
    assert ports.addresses == Addresses("", f"[{NEW}]:7711")


def test_peers_that_call_from_another_source_have_moved() -> None:
    sources = AcceptedSources()

    def moved(**seen: tuple[str, ...]) -> set[str]:
        return set(sources.moved(RunView(sources={PeerId(peer): each for peer, each in seen.items()})))

    assert not moved(a=(OLD,))
    assert not moved(a=(OLD,), b=(OTHER,))
    assert moved(a=(OLD, OTHER), b=(OTHER,)) == {A}
    assert not moved(a=(OTHER, OLD), b=(OTHER,))


class Sources:
    """The view of a member whose calls come from `seen`."""

    def __init__(self) -> None:
        self.seen: tuple[str, ...] = ()

    async def until(self, ready: Callable[[RunView], T | None]) -> T:
        while (found := ready(RunView(sources={A: self.seen}))) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        return found


@pytest.mark.parametrize(
    ("seen", "is_news"),
    [((OLD, OTHER), True), ((OLD, "2001:db8::/64"), False), (("2001:db8::/64", OLD, OTHER), True)],
)
def test_another_source_is_news_unless_it_is_the_first_of_its_version(
    seen: tuple[str, ...], is_news: bool
) -> None:
    async def main() -> bool:
        sources = Sources()
        watch = SourceWatch(cast(Any, sources), A)
        changing = asyncio.create_task(watch.change())
        for until in range(1, len(seen) + 1):
            sources.seen = seen[:until]
            await asyncio.sleep(1)
        changing.cancel()
        return changing.done()

    assert run(main()) is is_news


async def test_a_new_connection_ends_the_calls_of_the_former_one(tmp_path: Path) -> None:
    identity = open_identity(tmp_path / "peer.key")
    async with running(spec_of(), tmp_path / "coordinator") as coordinator:
        credentials = await enroll(await coordinator.invite(), identity, 10)
        client = CoordinatorClient(credentials, identity)
        await client.join(Role.REPLICA, Capacity("cpu", 2**30, 1), Addresses("127.0.0.1:9"), "", 10)
        updates = client.watch()
        await anext(updates)
        waiting = asyncio.ensure_future(anext(updates))
        await asyncio.sleep(0)  # it waits now
        await client.reconnect()
        with pytest.raises(HetnodeError) as error:
            await waiting
        assert error.value.code is ErrorCode.COORDINATOR_UNREACHABLE
        await client.heartbeat(1, 0)
        await client.close()
