"""Watchers that take changes know the same as those that are told everything."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.api.watch import Announcements, Watcher
from coordinator.membership.sources import MemberSources
from coordinator.run.state.commands import Ban, Unban
from coordinator.run.state.events import PlanAdopted
from coordinator.run.state.state import KEPT_DECISIONS
from node.net.plan_updates import PlanUpdate, PlanUpdates
from protocol.types import PeerId, Plan, Role
from protocol.wire.convert.fields import MAX_BANNED
from tests.builders import keyed
from tests.support.coordinator_run import Run, leave, play_round, started

COORDINATOR = keyed(99)
STEPS = st.lists(
    st.tuples(st.sampled_from(["join", "leave", "ban", "unban", "round", "source"]), st.integers(3, 8)),
    max_size=25,
)


class Watching:
    """What one watcher has received, opened as a node opens it."""

    def __init__(self, run: Run, announcements: Announcements, changes: bool) -> None:
        self._watcher = Watcher(keyed(0).peer, announcements, changes=changes)
        self._updates = PlanUpdates(run.spec.name, COORDINATOR.peer)
        self.nbytes = 0

    def read(self, run: Run) -> list[PlanUpdate]:
        received = []
        while (update := self._watcher.update(run.state)) is not None:
            self.nbytes += update.ByteSize()
            received.append(self._updates.opened(update))
        return received


def step(run: Run, sources: MemberSources, kind: str, number: int) -> None:
    peer = keyed(number)
    known = run.state.peers.get(peer.peer)
    is_live = known is not None and known.is_live
    match kind:
        case "join" if not is_live and peer.peer not in run.state.banned:
            run.accept(peer.join(run.spec, Role.REPLICA if number % 2 else Role.STAGE))
        case "leave" if is_live:
            leave(run, peer)
        case "ban":
            run.accept(Ban(peer.peer, "a test"))
        case "unban" if peer.peer in run.state.banned:
            run.accept(Unban(peer.peer))
        case "round":
            play_round(run)
        case "source":
            sources.note(peer.peer, f"192.0.2.{number}", run.now)


@settings(max_examples=30, deadline=None)
@given(STEPS)
def test_changes_and_whole_updates_tell_the_same(steps: list[tuple[str, int]]) -> None:
    run, sources = started(3), MemberSources()
    announcements = Announcements(run.spec.name, COORDINATOR.sign, sources)
    whole, changes = (Watching(run, announcements, each) for each in (False, True))
    for kind, number in steps:
        step(run, sources, kind, number)
        assert changes.read(run) == whole.read(run)


def test_a_new_plan_of_a_large_swarm_is_a_small_update() -> None:
    run = started(30)
    announcements = Announcements(run.spec.name, COORDINATOR.sign, MemberSources())
    watching = Watching(run, announcements, changes=True)
    (first, *_) = watching.read(run)
    assert first.plan is not None
    before = watching.nbytes
    leave(run, keyed(17))
    play_round(run)
    later = [update for update in watching.read(run) if update.plan is not None]
    assert [update.plan for update in later] == [run.state.plans[-1]]
    assert run.state.plans[-1] == replace(run.state.plans[-1], epoch=2)
    assert watching.nbytes - before < before / 3


def test_the_first_update_has_the_plan_of_the_open_round_and_the_next_ones_each_later_plan() -> None:
    run = started(2)
    [first] = run.state.plans
    later = [replace(first, epoch=epoch, from_round=run.state.current_round + 1) for epoch in (2, 3)]
    for plan in later:
        run.apply(PlanAdopted(run.now, plan))

    def told() -> list[Plan | None]:
        announcements = Announcements(run.spec.name, COORDINATOR.sign, MemberSources())
        return [update.plan for update in Watching(run, announcements, changes=True).read(run)]

    assert told() == [first, *later]
    play_round(run)
    assert told() == later[-1:]


def test_a_watcher_whose_plan_is_not_kept_any_more_is_told_the_newest_as_a_whole() -> None:
    run = started(2, rounds=100)
    announcements = Announcements(run.spec.name, COORDINATOR.sign, MemberSources())
    watching = Watching(run, announcements, changes=True)
    watching.read(run)
    for _ in range(KEPT_DECISIONS + 5):
        play_round(run)
        newest = run.state.plans[-1]
        following = replace(newest, epoch=newest.epoch + 1, from_round=run.state.current_round)
        run.apply(PlanAdopted(run.now, following))
    assert run.state.plan_of(1) is None
    assert [update.plan for update in watching.read(run)] == [*run.state.plans]


def test_nodes_are_told_as_many_excluded_peers_as_they_take_and_all_that_are_banned() -> None:
    run = started(2)
    run.accept(Ban(keyed(7).peer, "a test"))
    run.accept(keyed(3).join(run.spec))
    strangers = frozenset(PeerId(keyed(0).peer[:-5] + f"{number:05d}") for number in range(MAX_BANNED + 5))
    run.state = replace(run.state, quarantined=strangers | {keyed(3).peer})
    announcements = Announcements(run.spec.name, COORDINATOR.sign, MemberSources())
    (update,) = Watching(run, announcements, changes=True).read(run)
    assert len(update.banned) == MAX_BANNED
    assert {keyed(7).peer, keyed(3).peer} <= update.banned
