"""Who reduces nothing after a round without agreement."""

from __future__ import annotations

import pytest

from coordinator.base.persistent_map import PersistentMap
from coordinator.reduction.reducers import FIRST_BENCH, LONGEST_BENCH, failed_reducers, with_benches
from coordinator.run.state.records import Round
from protocol.types import ExchangeGroup, MemberLine, PeerId, ResultClaim
from tests.builders import keyed, spec_of

SPEC = spec_of(outer__exchange="reduced")
NAMES = {peer.peer: name for name, peer in zip("abcd", (keyed(number) for number in range(4)), strict=True)}
PEERS = {name: peer for peer, name in NAMES.items()}


def failed(lacks: dict[str, str], silent: str = "", dials: str = "") -> str:
    """The names of the failed reducers of a, b, c, d; `lacks`: by teller, whose parts it lacks."""
    payloads = sorted((keyed(number).payload(SPEC, 0, 1) for number in range(4)), key=lambda d: d.owner)
    lines = tuple(MemberLine(0, 0, NAMES[each.owner] not in dials) for each in payloads)
    rejections: dict[PeerId, dict[PeerId, str]] = {}
    for teller, owners in lacks.items():
        for owner in owners:
            rejections.setdefault(PEERS[owner], {})[PEERS[teller]] = "late"
    holders = [name for name in "abcd" if name not in lacks and name not in silent]
    results = {PEERS[name]: ResultClaim("1" * 64, 9) for name in holders}
    group = ExchangeGroup("g", tuple(payloads), 1.0, lines)
    state = Round(group=group, results=PersistentMap(results), rejections=rejections)
    return "".join(sorted(NAMES[peer] for peer in failed_reducers(state)))


@pytest.mark.parametrize(
    ("lacks", "silent", "dials", "expected"),
    [
        ({"a": "d", "b": "d", "c": "d"}, "d", "", "d"),
        ({"a": "d", "b": "d"}, "cd", "", "d"),
        ({"a": "d", "b": "d", "c": "d"}, "", "", "d"),
        ({"a": "bcd"}, "", "", "a"),
        ({}, "c", "", "c"),
        ({}, "c", "c", ""),
        ({"c": "abd"}, "", "c", ""),
        ({"c": "a"}, "", "c", ""),
        ({"b": "a", "c": "a"}, "", "bc", "a"),
        ({"a": "b", "b": "ac", "c": "b"}, "", "", "b"),
        ({"a": "b", "b": "a", "c": "b", "d": "b"}, "", "", "ab"),
        ({"a": "b", "b": "a", "c": "b", "d": "b"}, "", "d", "b"),
        ({"a": "b", "b": "acd", "c": "ab", "d": "ab"}, "", "", "b"),
        ({"a": "b", "b": "ac", "c": "ab"}, "", "d", "b"),
    ],
    ids=[
        "dead",
        "two dead",
        "mute",
        "liar",
        "silent",
        "silent home",
        "lying home",
        "one home",
        "two homes",
        "middle",
        "unsigned",
        "unsigned of three",
        "cut off",
        "cut off of three",
    ],
)
def test_the_fewest_members_that_explain_it_fail(
    lacks: dict[str, str], silent: str, dials: str, expected: str
) -> None:
    assert failed(lacks, silent, dials) == expected


def test_of_two_that_cannot_reach_each_other_one_fails() -> None:
    assert len(failed({"a": "b", "b": "a"})) == 1


def test_each_further_bench_is_twice_as_long() -> None:
    peer = PEERS["a"]
    first = with_benches({}, 10, frozenset({peer}))
    assert first == {peer: (10 + FIRST_BENCH, FIRST_BENCH)}
    assert with_benches(first, 30, frozenset({peer}))[peer][1] == 2 * FIRST_BENCH
    long = with_benches({peer: (1, LONGEST_BENCH)}, 600, frozenset({peer}))
    assert long[peer] == (600 + LONGEST_BENCH, LONGEST_BENCH)
