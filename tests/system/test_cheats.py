"""Contributors that cheat among honest ones, in a swarm of production nodes on a virtual clock."""

from __future__ import annotations

import pytest

from coordinator.run.state.events import PeerWeighed
from protocol.types import Role
from tests.support.cheats import HONEST_ROUNDS, cheat
from tests.virtual.network import current_machine
from tests.virtual.scenario import SPARSE, Play, contributions
from tests.virtual.swarm import VirtualSwarm

HONEST, LIAR, ROUNDS = "abcd", "e", 10
MEMBERS = dict.fromkeys(HONEST + LIAR, Role.REPLICA)


def fallen(swarm: VirtualSwarm) -> dict[str, int]:
    """The rounds up to which contributors were judged that count for nothing, by the names of their nodes."""
    names = {swarm.peer(name): name for name in MEMBERS}
    events = swarm.happened(PeerWeighed)
    return {names[event.peer]: event.round_number for event in events if not event.counts}


@pytest.mark.parametrize(
    "kind", [pytest.param("flip", marks=pytest.mark.slow), "noise"]
)  # the others: tests/hostile/test_cheats.py
def test_a_payload_that_does_not_agree_with_the_others_soon_counts_for_nothing(
    play: Play, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    cheat(monkeypatch, {LIAR: kind}, current_machine)
    swarm = play.to_the_end(None, MEMBERS, ROUNDS, **SPARSE)
    found = fallen(swarm)
    assert found.keys() == {LIAR}
    assert found[LIAR] <= 6
    assert max(contributions(swarm, LIAR)) <= found[LIAR] + 2
    assert all(contributions(swarm, name) == swarm.rounds for name in HONEST)
    assert swarm.state.strikes[swarm.peer(LIAR)]


def test_a_contributor_that_was_honest_until_it_had_weight_loses_it(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    cheat(monkeypatch, {LIAR: "adaptive"}, current_machine)
    swarm = play.to_the_end(None, MEMBERS, HONEST_ROUNDS + 6, **SPARSE)
    assert fallen(swarm).keys() == {LIAR}
    assert fallen(swarm)[LIAR] > HONEST_ROUNDS


def test_honest_contributors_of_unlike_kinds_keep_their_weight(play: Play) -> None:
    members = {**dict.fromkeys("ab", Role.REPLICA), **dict.fromkeys("cdef", Role.STAGE)}
    swarm = play.to_the_end(None, members, 12, **SPARSE, **{"link.k": 4})
    assert not swarm.happened(PeerWeighed)
