"""Simulated swarms: the same seed gives the same run, and the planner agrees with it."""

from __future__ import annotations

import pytest

from benchmarks.simulated_lines import embedding_seconds, gather_seconds
from benchmarks.simulation import FULL, Churn, forecasts, simulate
from protocol.group.gathering import schedule_of
from protocol.types import Capacity, ExchangeGroup, ManifestEntry, MemberLine
from tests.builders import keyed, spec_of

CHURN = Churn(on_hours=0.5, off_hours=0.1)


@pytest.mark.parametrize("exchange", ["gathered", "reduced"])
@pytest.mark.parametrize("nodes", [50, pytest.param(200, marks=pytest.mark.slow)])
def test_the_planner_predicts_a_swarm_without_churn(nodes: int, exchange: str) -> None:
    found = simulate(nodes, 1, exchange=exchange)
    planned = forecasts([nodes], exchange=exchange)[nodes]
    assert found.aborted == found.lost == 0
    assert found.tokens_per_second == pytest.approx(planned.tokens_per_second, rel=0.15)
    assert found.round_seconds == pytest.approx(planned.round_seconds, rel=0.15)


def test_the_same_seed_gives_the_same_events() -> None:
    found = [simulate(20, 3, CHURN) for _ in range(2)]
    assert found[0].digest == found[1].digest
    assert simulate(20, 3, Churn(0.5, 0.1, seed=1)).digest != found[0].digest


@pytest.mark.parametrize("exchange", ["gathered", pytest.param("reduced", marks=pytest.mark.slow)])
def test_a_swarm_with_churn_loses_peers_takes_them_back_and_commits(exchange: str) -> None:
    found = simulate(50, 8, CHURN, exchange=exchange)
    assert found.lost > 0
    assert found.plans > 3
    assert found.committed > found.aborted
    without = simulate(50, 1).tokens_per_second
    assert 0.3 * without < found.tokens_per_second < 1.1 * without


def test_a_gathering_takes_as_long_as_its_slowest_sender_and_the_own_line() -> None:
    spec = spec_of()
    descriptors = tuple(keyed(number).payload(spec, 0, 1) for number in range(4))
    owners = [each.owner for each in descriptors]
    fast, slow = Capacity("", 1, 1, uplink=1000.0, downlink=1000.0), Capacity("", 1, 1, 0.0, 10.0, 20.0)
    capacities = dict(zip(owners, (fast, fast, slow, slow), strict=True))
    stages = dict.fromkeys(owners, 1)
    direct = gather_seconds(ExchangeGroup("g", descriptors), stages, capacities.__getitem__)
    assert direct == dict.fromkeys(owners, 3 * 100 / 10.0)  # each sends 3 copies of 100 bytes
    lines = tuple(
        MemberLine(round(capacities[each].uplink), round(capacities[each].downlink), True) for each in owners
    )
    helped = gather_seconds(ExchangeGroup("g", descriptors, 0.0, lines), stages, capacities.__getitem__)
    schedule = schedule_of("g", dict(zip(owners, lines, strict=True)))
    assert schedule is not None
    assert max(helped.values()) == pytest.approx(schedule.seconds(100)) == 3 * 100 / 20.0


def test_the_embedding_takes_as_long_as_its_holders_send() -> None:
    payload = keyed(0).payload(spec_of(), 0, 1)
    entries = [ManifestEntry(payload, (keyed(1).peer, keyed(2).peer))] * 2
    followers = [keyed(number).peer for number in (3, 4, 5)]
    found = embedding_seconds(entries, followers, lambda peer: FULL)
    rate = FULL.uplink
    assert found == dict.fromkeys(followers, pytest.approx(3 * 100 / rate))  # 600 bytes by two holders
