"""How a node keeps its standing: against a coordinator that says what it is told to, on a virtual clock."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence, Set
from itertools import pairwise
from typing import Any, TypeVar

import pytest

from node.net.coordinator_client import HeartbeatReply
from node.net.membership import Membership, RunView
from node.net.plan_updates import PlanUpdate
from node.net.sources import member_sources
from protocol.errors import ErrorCode, HetnodeError
from protocol.group.peers import MemberSource
from protocol.status import Wait
from protocol.types import Estimates, Member, PeerId, Plan, Replica, ReservedAssignment, StageRange
from tests.virtual.loop import VirtualLoop, VirtualProcess, run, start

T = TypeVar("T")

ME, OTHER = PeerId("me"), PeerId("other")
STAGES = StageRange(0, 1)
PLACE = ReservedAssignment(ME, 0, 0, STAGES)
HEARTBEAT = 2.0
AWAY = HetnodeError(ErrorCode.COORDINATOR_UNREACHABLE, "No connection.", "Wait.")
LOST = HetnodeError(ErrorCode.UNKNOWN_PEER, "It was silent for too long.", "Join again.")


def plan_of(epoch: int, from_round: int, *peers: PeerId) -> Plan:
    replicas = [Replica(i, (Member(peer, STAGES, ""),), ()) for i, peer in enumerate(peers)]
    return Plan(epoch, from_round, 0, tuple(replicas), "a test")


def news(
    plan: Plan | None = None, *followers: ReservedAssignment, round_number: int = 1, **more: Any
) -> PlanUpdate:
    return PlanUpdate(
        plan,
        **{"waiting": "", "finished": False, "banned": frozenset(), **more},
        followers=followers,
        round_number=round_number,
    )


class Coordinator:
    """Answers as `trouble` says, or else well. Keeps when it was called, by the name of the call."""

    def __init__(self) -> None:
        self.trouble: dict[str, HetnodeError] = {}
        self.calls: dict[str, list[float]] = {"watch": [], "heartbeat": [], "join": []}
        self.pulse = HeartbeatReply(1, None)
        self._streams: list[asyncio.Queue[PlanUpdate | HetnodeError]] = []

    def tell(self, what: PlanUpdate | HetnodeError) -> None:
        """To the newest stream alone."""
        self._streams[-1].put_nowait(what)

    async def watch(self) -> AsyncIterator[PlanUpdate]:
        self._called("watch")
        stream: asyncio.Queue[PlanUpdate | HetnodeError] = asyncio.Queue()
        self._streams.append(stream)
        while True:
            told = await stream.get()
            if isinstance(told, HetnodeError):
                raise told
            yield told

    async def heartbeat(
        self,
        round_number: int,
        inner_step: int,
        estimates: Estimates | None = None,
        waits: Sequence[Wait] = (),
        kept: Sequence[int] = (),
    ) -> HeartbeatReply:
        self._called("heartbeat")
        self.waits = tuple(waits)
        return self.pulse

    async def join(self) -> None:
        self._called("join")
        self.trouble = {call: error for call, error in self.trouble.items() if error is not LOST}

    def _called(self, name: str) -> None:
        self.calls[name].append(asyncio.get_running_loop().time())
        if name in self.trouble:
            raise self.trouble[name]


Scenario = Callable[[Coordinator, Membership], Awaitable[T]]


def play(scenario: Scenario[T]) -> T:
    """Run `scenario` beside a membership that is being kept, after its first heartbeat."""

    async def main() -> T:
        coordinator = Coordinator()
        membership = Membership(coordinator, coordinator.join, HEARTBEAT)  # type: ignore[arg-type]
        keeping = start(VirtualProcess("me"), membership.keep(), name="keep")
        await asyncio.sleep(0.1)
        try:
            return await scenario(coordinator, membership)
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)

    random.seed(0)
    return run(main())


async def hears(coordinator: Coordinator, membership: Membership, *told: PlanUpdate) -> RunView:
    """The standing after the node has heard all of `told`."""
    for each in told:
        coordinator.tell(each)
    await asyncio.sleep(0.1)
    return membership.run_view


def epochs(run_view: RunView) -> list[int]:
    return sorted(run_view.plans)


def test_an_assignment_is_valid_from_the_round_of_its_plan() -> None:
    async def scenario(coordinator: Coordinator, membership: Membership) -> None:
        plans = [news(plan_of(1, 1, ME, OTHER)), news(plan_of(2, 5, OTHER), PLACE, round_number=4)]
        run_view = await hears(coordinator, membership, plans[0])
        assert run_view.assignment_of(ME, 1) is not None
        assert run_view.reservation_of(ME) == PLACE
        run_view = await hears(coordinator, membership, plans[1])
        assert run_view.assignment_of(OTHER, 4) is not None
        assert run_view.assignment_of(ME, 5) is None
        assert run_view.reservation_of(ME) == PLACE
        assert run_view.hosts_of(0) == [ME, OTHER]

    play(scenario)


def test_the_assignment_of_a_follower_is_invalid_until_a_later_plan() -> None:
    async def scenario(coordinator: Coordinator, membership: Membership) -> None:
        first = plan_of(1, 1, ME, OTHER)
        run_view = await hears(coordinator, membership, news(first, PLACE))
        assert run_view.assignment_of(ME, 1) is None
        assert run_view.assignment_of(OTHER, 1) is not None
        run_view = await hears(coordinator, membership, news(first), news(None))
        assert not run_view.followers
        assert run_view.assignment_of(ME, 1) is None, "it had no part in that plan, whatever it stands in now"
        run_view = await hears(coordinator, membership, news(plan_of(2, 1, ME, OTHER)))
        assignment = run_view.assignment_of(ME, 1)
        assert assignment is not None
        assert assignment.plan.epoch == 2

    play(scenario)


def test_joining_again_drops_the_plans_and_receives_them_again() -> None:
    async def scenario(coordinator: Coordinator, membership: Membership) -> None:
        old = [
            news(plan_of(1, 1, ME, OTHER)),
            news(plan_of(2, 4, ME), round_number=4, banned=frozenset({OTHER})),
        ]
        run_view = await hears(coordinator, membership, *old)
        assert (run_view.session, epochs(run_view), run_view.round_number) == (1, [1, 2], 4)
        await membership.rejoin(run_view.session)
        run_view = membership.run_view
        assert (run_view.session, epochs(run_view), run_view.round_number) == (2, [], 0)
        assert run_view.assignment_of(ME, 4) is None
        assert run_view.reservation_of(ME) is None
        assert run_view.banned == {OTHER}, "it stays banned until the coordinator lifts the ban"
        await asyncio.sleep(2)
        assert len(coordinator.calls["watch"]) == 2
        run_view = await hears(coordinator, membership, news(plan_of(3, 9, ME), PLACE, round_number=8))
        assert (epochs(run_view), run_view.round_number) == ([3], 8)

    play(scenario)


def test_tasks_that_notice_a_lost_session_join_once() -> None:
    async def scenario(coordinator: Coordinator, membership: Membership) -> None:
        coordinator.trouble = {"heartbeat": LOST}
        coordinator.tell(LOST)
        await asyncio.gather(*(membership.rejoin(1) for _ in range(3)))
        await asyncio.sleep(10)
        await membership.rejoin(1)
        assert len(coordinator.calls["join"]) == 1
        assert membership.run_view.session == 2

    play(scenario)


@pytest.mark.parametrize("call", ["heartbeat", "watch"])
def test_a_node_removed_as_lost_joins_again(call: str) -> None:
    async def scenario(coordinator: Coordinator, membership: Membership) -> None:
        coordinator.trouble = {call: LOST}
        if call == "watch":
            coordinator.tell(LOST)
        assert (
            await membership.until(lambda run_view: run_view.session if run_view.session > 1 else None) == 2
        )

    play(scenario)


@pytest.mark.parametrize("call", ["heartbeat", "watch", "join"])
def test_a_refusal_ends_the_membership(call: str) -> None:
    banned = HetnodeError(ErrorCode.BANNED, "Banned.", "Ask.")

    async def main() -> None:
        coordinator = Coordinator()
        membership = Membership(coordinator, coordinator.join, HEARTBEAT)  # type: ignore[arg-type]
        coordinator.trouble = {call: banned, **({"watch": LOST} if call == "join" else {})}
        with pytest.raises(BaseExceptionGroup) as caught:
            await membership.keep()
        assert caught.value.exceptions == (banned,)

    run(main())


@pytest.mark.parametrize(("call", "seconds"), [("watch", 1.0), ("join", 1.0), ("heartbeat", HEARTBEAT)])
def test_retries_are_jittered(call: str, seconds: float) -> None:
    async def scenario(coordinator: Coordinator, membership: Membership) -> None:
        coordinator.trouble = {call: AWAY}
        if call == "watch":
            coordinator.tell(AWAY)
        joining = asyncio.create_task(membership.rejoin(1)) if call == "join" else None
        await asyncio.sleep(30)
        pauses = [later - earlier for earlier, later in pairwise(coordinator.calls[call])][1:]
        assert len(pauses) > 10
        assert all(0.75 * seconds <= pause <= 1.25 * seconds for pause in pauses)
        assert len({round(pause, 3) for pause in pauses}) > 10
        coordinator.trouble = {}
        if joining is not None:
            await joining
            assert membership.run_view.session == 2

    play(scenario)


def test_away_counts_from_the_last_answer_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def scenario(coordinator: Coordinator, membership: Membership) -> None:
        assert membership.away == 0
        await asyncio.sleep(20)
        assert membership.away == 0
        coordinator.trouble = {"heartbeat": AWAY}
        await asyncio.sleep(60)
        assert 60 - 3.5 * HEARTBEAT < membership.away < 60
        coordinator.trouble = {}
        await asyncio.sleep(2 * HEARTBEAT)
        assert membership.away == 0

    play(scenario)
    told = [record.message for record in caplog.records]
    assert [text.partition(":")[0] for text in told] == [
        "waiting for the coordinator; this node goes on by itself when it answers",
        "the coordinator is back",
    ]


def test_an_address_that_nobody_serves_any_more_is_told_again_with_what_to_ask(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(coordinator: Coordinator, membership: Membership) -> None:
        coordinator.trouble = {"heartbeat": AWAY}
        await asyncio.sleep(24 * 3600)

    play(scenario)
    first, *later = (record.message for record in caplog.records)
    assert "no action" not in caplog.text
    assert "new invite" not in first
    assert 5 <= len(later) <= 10, "rarer and rarer"
    assert later[0].startswith("waiting for the coordinator, 10 min so far; ")
    assert all("'hetnode join' with a new invite" in each for each in later)


def test_a_suspension_of_the_node_does_not_count_as_absence_of_the_coordinator() -> None:
    async def main() -> float:
        coordinator, process, loop = Coordinator(), VirtualProcess("me"), asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        membership = Membership(coordinator, coordinator.join, HEARTBEAT)  # type: ignore[arg-type]
        start(process, membership.keep())
        await asyncio.sleep(10)
        coordinator.trouble = {"heartbeat": AWAY}
        loop.suspend(process)
        await asyncio.sleep(600)
        loop.resume(process)
        await asyncio.sleep(1)
        return membership.away

    assert run(main()) == 0


def test_a_heartbeat_reply_gives_the_open_round_and_its_closing_time() -> None:
    async def scenario(coordinator: Coordinator, membership: Membership) -> None:
        coordinator.pulse = HeartbeatReply(7, 10.0)
        await membership.until(lambda run_view: run_view.round_number == 7 or None)
        assert membership.closes_in(7) == pytest.approx(10.0)
        assert membership.closes_in(8) is None
        assert (membership.closes_in(6) or 0) < 0
        await asyncio.sleep(1.0)
        assert membership.closes_in(7) == pytest.approx(9.0)

    play(scenario)


def test_the_coordinator_of_a_large_swarm_asks_for_fewer_heartbeats() -> None:
    async def scenario(coordinator: Coordinator, membership: Membership) -> None:
        coordinator.pulse = HeartbeatReply(1, None, 10 * HEARTBEAT)
        await asyncio.sleep(2 * HEARTBEAT)
        before = len(coordinator.calls["heartbeat"])
        await asyncio.sleep(100 * HEARTBEAT)
        assert 8 <= len(coordinator.calls["heartbeat"]) - before <= 14
        assert membership.away == 0
        coordinator.pulse = HeartbeatReply(1, None, 0.1 * HEARTBEAT)
        await asyncio.sleep(20 * HEARTBEAT)
        before = len(coordinator.calls["heartbeat"])
        await asyncio.sleep(100 * HEARTBEAT)
        assert 80 <= len(coordinator.calls["heartbeat"]) - before <= 134, "never more than the run says"

    play(scenario)


def test_a_heartbeat_tells_what_the_node_waits_for() -> None:
    async def scenario(coordinator: Coordinator, membership: Membership) -> None:
        assert coordinator.waits == ()
        membership.waits = lambda: (Wait.GROUP, Wait.PLAN)
        await asyncio.sleep(2 * HEARTBEAT)
        assert coordinator.waits == (Wait.GROUP, Wait.PLAN)

    play(scenario)


def test_the_allow_list_is_updated_before_other_tasks_see_the_plan() -> None:
    async def scenario(coordinator: Coordinator, membership: Membership) -> None:
        told: list[tuple[Set[PeerId], list[int]]] = []

        async def admit(peers: Set[PeerId], _: RunView) -> None:
            told.append((peers, epochs(membership.run_view)))
            if len(told) == 2:
                raise HetnodeError(ErrorCode.DHT_UNREACHABLE, "No peer answers.", "Wait.")

        await membership.attach(admit)
        plans = [plan_of(1, 1, OTHER), plan_of(2, 3, ME)]
        run_view = await hears(coordinator, membership, *(news(plan) for plan in plans), news(plans[1]))
        assert told == [(set(), []), ({OTHER}, []), ({ME, OTHER}, [1])]
        assert epochs(run_view) == [1, 2], "a DHT that is away keeps no plan from this node"

    play(scenario)


def test_plans_of_rounds_long_past_are_forgotten() -> None:
    async def scenario(coordinator: Coordinator, membership: Membership) -> None:
        for epoch in range(1, 501):
            place = ReservedAssignment(PeerId(f"peer {epoch}"), 0, 0, STAGES)
            coordinator.tell(news(plan_of(epoch, epoch, OTHER), place, round_number=epoch))
        run_view = await hears(coordinator, membership)
        assert epochs(run_view)[-1] == 500
        assert len(run_view.plans) < 40
        assert len(run_view.followed) < 40
        assert run_view.plan_for(500) is not None

    play(scenario)


def test_a_round_that_a_heartbeat_tells_of_while_peers_are_admitted_stays_known() -> None:
    async def scenario(coordinator: Coordinator, membership: Membership) -> None:
        async def admit(_: Set[PeerId], run_view: RunView) -> None:
            if run_view.plans:
                coordinator.pulse = HeartbeatReply(12, None)
                await membership.until(lambda run_view: run_view.round_number == 12 or None)

        await membership.attach(admit)
        coordinator.tell(news(plan_of(1, 11, ME), round_number=11))
        run_view = await membership.until(lambda run_view: run_view if run_view.plans else None)
        assert run_view.round_number == 12

    play(scenario)


def test_new_sources_are_admitted_and_known_ones_stay_when_the_coordinator_begins_anew() -> None:
    async def scenario(coordinator: Coordinator, membership: Membership) -> None:
        told: list[Set[str]] = []

        async def admit(_: Set[PeerId], run_view: RunView) -> None:
            told.append(member_sources(run_view))

        await membership.attach(admit)
        mine, theirs, moved = (
            MemberSource(peer, source)
            for peer, source in ((ME, "192.0.2.1"), (OTHER, "192.0.2.2"), (OTHER, "2001:db8:1:2::/64"))
        )
        await hears(coordinator, membership, news(sources=(mine, theirs)), news(sources=(moved,)))
        await hears(coordinator, membership, news(sources=(mine,)))  # of a coordinator that starts again
        await hears(coordinator, membership, news(banned=frozenset({OTHER})), news(banned=frozenset()))
        both = {mine.source, theirs.source}
        assert told == [set(), both, both | {moved.source}, {mine.source}, both | {moved.source}]

    play(scenario)


def test_of_each_peer_the_newest_four_sources_count() -> None:
    async def scenario(coordinator: Coordinator, membership: Membership) -> None:
        seen = [MemberSource(OTHER, f"192.0.2.{number}") for number in (1, 2, 3, 1, 4, 5)]
        run_view = await hears(coordinator, membership, *(news(sources=(each,)) for each in seen))
        assert run_view.sources == {OTHER: ("192.0.2.3", "192.0.2.1", "192.0.2.4", "192.0.2.5")}

    play(scenario)


def test_the_link_to_a_banned_neighbour_ends() -> None:
    async def scenario(coordinator: Coordinator, membership: Membership) -> None:
        waiting = asyncio.create_task(membership.link_over(OTHER))
        await hears(coordinator, membership, news(None))
        assert not waiting.done()
        await hears(coordinator, membership, news(None, banned=frozenset({OTHER})))
        assert (await waiting).code is ErrorCode.NEIGHBOUR_LOST

    play(scenario)


def test_the_link_to_a_neighbour_ends_when_it_gives_up_and_not_when_it_is_replaced() -> None:
    theirs = ReservedAssignment(OTHER, 0, 0, STAGES)

    async def scenario(coordinator: Coordinator, membership: Membership) -> None:
        waiting = asyncio.create_task(membership.link_over(OTHER))
        # Another peer takes its place in the next round, and both still train in this one.
        await hears(coordinator, membership, news(plan_of(1, 1, ME, OTHER)), news(plan_of(2, 2, ME), theirs))
        assert not waiting.done()
        await hears(coordinator, membership, news(plan_of(3, 3, ME, OTHER)))
        assert not waiting.done()
        await hears(coordinator, membership, news(None, theirs))
        assert "has given up its assignment" in str(await waiting)

    play(scenario)


def test_a_link_ends_when_the_neighbour_calls_from_another_address() -> None:
    """Its last frames may be lost, although it has trained its round to the end and does not give up."""

    async def scenario(coordinator: Coordinator, membership: Membership) -> None:
        await hears(coordinator, membership, news(sources=(MemberSource(OTHER, "192.0.2.1"),)))
        waiting = asyncio.create_task(membership.link_over(OTHER))
        await hears(coordinator, membership, news(sources=(MemberSource(OTHER, "2001:db8::/64"),)))
        assert not waiting.done(), "it may use IPv4 and IPv6"
        await hears(coordinator, membership, news(sources=(MemberSource(OTHER, "192.0.2.2"),)))
        assert "has another address" in str(await waiting)

    play(scenario)


def test_links_end_when_this_machine_has_another_address() -> None:
    async def scenario(coordinator: Coordinator, membership: Membership) -> None:
        waiting = asyncio.create_task(membership.link_over(OTHER))
        await asyncio.sleep(0.1)
        await membership.note_move()
        assert "another address" in str(await waiting)
        later = asyncio.create_task(membership.link_over(OTHER))
        await hears(coordinator, membership, news(None))
        assert not later.done()
        later.cancel()

    play(scenario)


def test_no_heartbeat_stands_in_the_way_of_a_join_whose_answer_was_lost() -> None:
    """To the coordinator who sends heartbeats takes part, and a second join comes from another process."""

    async def scenario(coordinator: Coordinator, membership: Membership) -> None:
        coordinator.trouble = {"join": AWAY}
        coordinator.tell(LOST)
        await asyncio.sleep(0.1)
        coordinator.calls["heartbeat"].clear()
        await asyncio.sleep(20)
        assert len(coordinator.calls["join"]) > 5
        assert coordinator.calls["heartbeat"] == []
        coordinator.trouble = {}
        await membership.joined_after(0)
        await asyncio.sleep(5)
        assert coordinator.calls["heartbeat"]

    play(scenario)
