"""Where members call from: what of it is remembered, and what watchers have yet to learn."""

from __future__ import annotations

from coordinator.membership.sources import MOST_PEERS, NOTHING, MemberSources
from protocol.group.peers import MemberSource
from protocol.types import PeerId

A, B = PeerId("a"), PeerId("b")
LONG = 1e6
"""Seconds after which a peer may change its source again."""


def test_a_source_is_new_once() -> None:
    sources = MemberSources()
    assert sources.note(A, "192.0.2.1", 0.0)
    assert not sources.note(A, "192.0.2.1", 1.0)
    assert sources.note(B, "192.0.2.1", 2.0)
    assert sources.without(()) == {"192.0.2.1"}


def test_the_source_of_an_excluded_peer_counts_only_if_another_peer_has_it_too() -> None:
    sources = MemberSources()
    for peer, source in ((A, "192.0.2.1"), (A, "192.0.2.2"), (B, "192.0.2.2")):
        sources.note(peer, source, 0.0)
    assert sources.without({A}) == {"192.0.2.2"}
    assert sources.without({A, B}) == set()


def test_the_oldest_source_of_a_peer_goes_first() -> None:
    sources = MemberSources()
    for number in range(6):
        assert sources.note(A, f"192.0.2.{number}", number * LONG)
    assert sources.without(()) == {f"192.0.2.{number}" for number in (2, 3, 4, 5)}


def test_a_peer_that_changes_its_source_all_the_time_keeps_the_first_ones() -> None:
    sources = MemberSources()
    assert [sources.note(A, f"192.0.2.{number}", 0.0) for number in range(6)] == 4 * [True] + 2 * [False]
    assert sources.note(B, "192.0.2.9", 0.0)
    assert sources.without(()) == {*(f"192.0.2.{number}" for number in range(4)), "192.0.2.9"}


def test_the_peer_that_has_not_called_for_the_longest_time_is_forgotten_first() -> None:
    sources = MemberSources()
    for number in range(MOST_PEERS):
        sources.note(PeerId(str(number)), f"192.0.2.{number % 250}", 0.0)
    sources.note(PeerId("0"), "192.0.2.0", 1.0)
    sources.note(A, "198.51.100.1", 2.0)
    others = {PeerId(str(number)) for number in range(2, MOST_PEERS)}
    assert sources.without({*others, A}) == {"192.0.2.0"}


def test_a_watcher_learns_each_source_once() -> None:
    sources, told = MemberSources(), []
    position = NOTHING
    for peer, source in ((A, "192.0.2.1"), (B, "192.0.2.2")):
        sources.note(peer, source, 0.0)
        told.append(list(sources.since(position)))
        position = sources.position
    assert told == [[MemberSource(A, "192.0.2.1")], [MemberSource(B, "192.0.2.2")]]
    assert list(sources.since(position)) == []
    assert list(sources.since(NOTHING)) == told[0] + told[1]


def test_no_watcher_misses_a_source_when_the_memory_is_tidied_up() -> None:
    sources, known, position, longest = MemberSources(), {}, NOTHING, 0
    for number in range(3000):
        sources.note(A, f"198.51.{number // 250}.{number % 250}", number * LONG)
        before, position_then = position, sources.position
        assert position_then > before
        for each in sources.since(position):
            known.pop(each, None)
            known[each] = None
        position = position_then
        longest = max(longest, len(sources.since(NOTHING)))
    assert {each.source for each in list(known)[-4:]} == sources.without(())
    assert longest < 1100
