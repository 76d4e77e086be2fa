"""What a node measures of its connections to others, and when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from node.measure import measure
from node.measure.measure import MOST_NEIGHBOURS, LinkProber, candidates
from node.net.live_estimates import LiveEstimates
from node.net.membership import RunView
from node.net.probe import Figures
from protocol.errors import ErrorCode, HetnodeError
from protocol.server.line import Line
from protocol.types import (
    Capacity,
    LinkEstimate,
    Member,
    PeerId,
    Plan,
    Replica,
    ReservedAssignment,
    StageRange,
)
from tests.virtual.loop import run as run_virtually

CAPACITY = Capacity("cpu", 3 * 2**30, 2)


ME = PeerId("me")


REFUSED = HetnodeError(ErrorCode.RATE_LIMITED, "Not now.", "Later.")


# Which peers are measured


def placed(**stages: int) -> RunView:
    """Peers with one stage each."""
    followers = {
        PeerId(peer): ReservedAssignment(PeerId(peer), 0, stage, StageRange(stage, stage + 1))
        for peer, stage in stages.items()
    }
    return RunView(followers=followers)


ENDPOINTS = {name: f"{name}:1" for name in ("me", "a", "b", "c", "d", "e", "f")}


def test_peers_with_adjacent_stages_are_measured_first() -> None:
    run_view = placed(me=2, a=0, b=1, c=2, d=3, e=0)
    found = candidates(run_view, ENDPOINTS, ME)
    assert len(found) == MOST_NEIGHBOURS
    assert {peer for peer, _ in found[:2]} == {"b", "d"}
    assert all(endpoint == f"{peer}:1" for peer, endpoint in found)


def test_a_node_measures_neither_itself_nor_banned_peers_nor_peers_without_an_endpoint() -> None:
    run_view = RunView(banned=frozenset({PeerId("a")}))
    found = {peer for peer, _ in candidates(run_view, {"me": "me:1", "a": "a:1", "b": "b:1"}, ME)}
    assert found == {"b"}


def test_a_node_does_not_measure_the_coordinator_as_a_neighbour() -> None:
    async def main() -> None:
        around = Surroundings(measured_capacity())
        around.known = {around.credentials.coordinator: "coordinator:1", "a": "a:1"}
        watching = around.watch()
        await asyncio.sleep(40)
        assert around.opened == ["a:1"]
        await stopped(watching)

    run_virtually(main())


def test_different_nodes_measure_different_peers() -> None:
    endpoints = {f"peer-{number}": "h:1" for number in range(50)}
    chosen = {
        tuple(peer for peer, _ in candidates(RunView(), endpoints, PeerId(f"peer-{number}")))
        for number in range(10)
    }
    assert len(chosen) == 10


# While the node takes part


class FakeProbe:
    def __init__(self, figures: Figures) -> None:
        self._figures = figures

    async def figures(self, seconds: float = 2.0, line: Line | None = None) -> Figures:
        await asyncio.sleep(2 * seconds)
        return self._figures

    async def round_trip(self) -> float:
        await asyncio.sleep(self._figures.round_trip)
        return self._figures.round_trip


class Surroundings:
    """All that a prober needs of its node, on a virtual clock."""

    def __init__(self, capacity: Capacity = CAPACITY) -> None:
        self.estimates = LiveEstimates(capacity)
        self.credentials = SimpleNamespace(coordinator="12D3coordinator")
        self.run_view = RunView()
        self.known: dict[str, str] = {}
        self.figures = Figures(0.01, 1e6, 2e6)
        self.refused: set[str] = set()
        self.opened: list[str] = []
        self._open = 0

    async def endpoints(self) -> Mapping[str, str]:
        return dict(self.known)

    @asynccontextmanager
    async def probe(self, endpoint: str = "coordinator", peer: str = "") -> AsyncIterator[FakeProbe]:
        self.opened.append(endpoint)
        self._open += 1
        assert self._open == 1, "two at once disturb each other"
        try:
            if endpoint in self.refused:
                raise REFUSED
            yield FakeProbe(self.figures)
        finally:
            self._open -= 1

    def watch(self, joins_pipelines: bool = True) -> asyncio.Task[Any]:
        here: Any = self
        return asyncio.create_task(LinkProber(ME, here, here, here, self.probe, joins_pipelines).keep())


async def stopped(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_candidate_neighbours_are_measured_once_and_then_echoed() -> None:
    async def main() -> None:
        around = Surroundings(measured_capacity())
        around.known = {f"peer-{number}": f"host-{number}:1" for number in range(9)}
        watching = around.watch()
        await asyncio.sleep(30)
        assert len(around.opened) == len(set(around.opened)) == MOST_NEIGHBOURS
        links = around.estimates.now.links
        assert {(link.round_trip, link.bandwidth, link.incoming) for link in links} == {(0.01, 1e6, 2e6)}
        around.figures = Figures(0.05, 7.0, 7.0)
        await asyncio.sleep(120)
        assert {(link.round_trip, link.bandwidth) for link in around.estimates.now.links} == {(0.05, 1e6)}
        assert around.estimates.capacity.round_trip == 0.05
        await stopped(watching)

    run_virtually(main())


def test_an_echo_does_not_overwrite_what_was_learned_while_it_ran() -> None:
    async def main() -> None:
        around = Surroundings(measured_capacity())
        around.figures = Figures(500.0, 1.0, 1.0)
        watching = around.watch(joins_pipelines=False)
        await asyncio.sleep(300)
        around.estimates.computed(7e9, 1.0)
        await asyncio.sleep(400)
        assert around.estimates.capacity.round_trip == 500.0
        assert around.estimates.capacity.flops == 7e9
        await stopped(watching)

    run_virtually(main())


def measured_capacity() -> Capacity:
    return Capacity("cpu", 2**30, 2, 1e9, 1e6, 1e6, 0.01)


@pytest.mark.parametrize("is_known", [False, True])
def test_a_node_that_trains_measures_no_peer(is_known: bool) -> None:
    async def main() -> None:
        around = Surroundings(measured_capacity() if is_known else CAPACITY)
        around.known = {"a": "a:1", "b": "b:1"}
        member = Member(ME, StageRange(0, 2), "")
        around.run_view = RunView(
            plans={1: Plan(1, 1, 0, (Replica(0, (member,), ()),), "because")}, round_number=1
        )
        watching = around.watch()
        await asyncio.sleep(40)
        assert around.opened == []
        await stopped(watching)

    run_virtually(main())


def test_a_full_replica_has_no_neighbours_to_measure() -> None:
    async def main() -> None:
        around = Surroundings(measured_capacity())
        around.known = {"a": "a:1"}
        watching = around.watch(joins_pipelines=False)
        await asyncio.sleep(40)
        assert around.opened == []
        await stopped(watching)

    run_virtually(main())


def test_a_peer_that_joins_later_is_measured_then() -> None:
    async def main() -> None:
        around = Surroundings(measured_capacity())
        watching = around.watch()
        await asyncio.sleep(4)
        around.known = {"a": "a:1"}
        await asyncio.sleep(20)
        assert around.estimates.now.links == (LinkEstimate(PeerId("a"), 0.01, 1e6, 2e6),)
        await stopped(watching)

    run_virtually(main())


def test_refused_probes_leave_values_unknown_and_the_prober_continues() -> None:
    async def main() -> None:
        around = Surroundings()
        around.known = {"a": "a:1", "b": "b:1"}
        around.refused = {"coordinator", "a:1"}
        watching = around.watch()
        await asyncio.sleep(300)
        assert around.opened.count("coordinator") >= 3
        assert around.opened.count("a:1") == 1
        around.refused = set()
        assert not around.estimates.capacity.uplink
        assert [link.peer for link in around.estimates.now.links] == ["b"]
        assert not watching.done()
        await stopped(watching)

    run_virtually(main())


def test_a_coordinator_that_refused_the_first_probe_is_measured_later() -> None:
    async def main() -> None:
        around = Surroundings()
        around.refused = {"coordinator"}
        watching = around.watch()
        await asyncio.sleep(1)
        around.refused = set()
        await asyncio.sleep(60)
        assert around.estimates.capacity.uplink == 1e6
        assert around.estimates.capacity.downlink == 2e6
        await stopped(watching)

    run_virtually(main())


async def test_measuring_the_coordinator_never_raises() -> None:
    around: Any = Surroundings()
    around.refused = {"coordinator"}
    await measure.measure_coordinator(around, around.estimates)
    assert around.estimates.capacity == CAPACITY
