"""The result of a reduction that a round commits: what more than half of the group's weight holds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.run.state.commands import Leave, Report, Tick
from coordinator.run.state.events import PeerSeen
from coordinator.store import event_codec
from protocol.errors import ErrorCode
from protocol.types import Aborted, Committed, Decision, ResultClaim
from tests.builders import Keyed, keyed
from tests.support.coordinator_run import Run, beat_for, offer, started

PEERS = [keyed(number) for number in range(4)]
ONE, OTHER = ResultClaim("1" * 64, 1000), ResultClaim("2" * 64, 1000)


@pytest.fixture
def run() -> Run:
    """Four replicas with payloads in a group."""
    run = started(4, stages=1, outer__exchange="reduced")
    for peer in PEERS:
        offer(run, peer, peer.payload(run.spec, 0, 1))
    return run


def report(run: Run, peer: Keyed, claim: ResultClaim | None) -> None:
    run.accept(Report(peer.peer, 0, 1, (peer.payload(run.spec, 0, 1),), (), claim))


def decision(run: Run) -> Decision:
    return run.state.decisions[0, 1]


def test_the_group_knows_who_can_reduce_although_no_uplink_is_measured(run: Run) -> None:
    group = run.state.round_of(0, 1).group
    assert group is not None
    assert len(group.lines) == len(PEERS)


def test_the_result_that_all_hold_is_committed_with_all_payloads(run: Run) -> None:
    for peer in PEERS:
        report(run, peer, ONE)
    found = decision(run)
    assert isinstance(found, Committed)
    assert found.result is not None
    assert (found.result.sha256, found.result.nbytes) == (ONE.sha256, ONE.nbytes)
    assert found.result.holders == tuple(sorted(peer.peer for peer in PEERS))
    assert [entry.descriptor.owner for entry in found.entries] == sorted(peer.peer for peer in PEERS)
    assert found.reason == "4 of 4 members hold the same result"


def test_three_of_four_overrule_one_with_another_result_or_with_none(run: Run) -> None:
    for peer in PEERS[:3]:
        report(run, peer, ONE)
    report(run, PEERS[3], OTHER)
    found = decision(run)
    assert found.result is not None
    assert found.result.sha256 == ONE.sha256
    assert PEERS[3].peer not in found.result.holders
    assert PEERS[3].peer in [entry.descriptor.owner for entry in found.entries], "its payload is in the sum"


@pytest.mark.parametrize("claims", [(ONE, ONE, OTHER, OTHER), (ONE, ONE, None, None), (None,) * 4])
def test_half_of_the_weight_decides_nothing(run: Run, claims: tuple[ResultClaim | None, ...]) -> None:
    for peer, claim in zip(PEERS, claims, strict=True):
        report(run, peer, claim)
    found = decision(run)
    assert isinstance(found, Aborted)
    assert "none is held by more than half" in found.reason


def test_members_that_disagree_about_who_is_in_the_sum_hold_different_results(run: Run) -> None:
    for peer in PEERS[:2]:
        report(run, peer, ONE)
    for peer in PEERS[2:]:
        report(run, peer, replace(ONE, without=(PEERS[0].peer,)))
    assert isinstance(decision(run), Aborted)


def test_a_payload_that_is_in_no_part_does_not_count(run: Run) -> None:
    for peer in PEERS[:3]:
        report(run, peer, replace(ONE, without=(PEERS[3].peer,)))
    report(run, PEERS[3], None)
    found = decision(run)
    owners = [entry.descriptor.owner for entry in found.entries]
    assert owners == sorted(peer.peer for peer in PEERS[:3])
    assert "without 1 payload" in found.reason


def test_a_result_of_too_few_payloads_is_not_committed(run: Run) -> None:
    others = tuple(sorted(peer.peer for peer in PEERS[1:]))
    for peer in PEERS:
        report(run, peer, replace(ONE, without=others))
    assert isinstance(decision(run), Aborted)
    assert "weigh 1 of 4" in decision(run).reason


def test_the_dead_count_against_a_result(run: Run) -> None:
    for peer in PEERS[:2]:
        report(run, peer, ONE)
    for peer in PEERS[2:]:
        run.accept(Leave(peer.peer, "interrupted"))
    assert isinstance(decision(run), Aborted)


def test_the_deadline_decides_without_a_silent_member(run: Run) -> None:
    for peer in PEERS[:3]:
        report(run, peer, ONE)
    assert (0, 1) not in run.state.decisions
    group = run.state.round_of(0, 1).group
    assert group is not None
    beat_for(run, group.seconds + 60.0, *PEERS)
    run.accept(Tick())
    assert decision(run).result is not None


def test_a_reported_result_cannot_be_taken_back(run: Run) -> None:
    report(run, PEERS[0], ONE)
    report(run, PEERS[0], OTHER)
    assert run.state.round_of(0, 1).results == {PEERS[0].peer: ONE}


@pytest.mark.parametrize("claim", [replace(ONE, without=("stranger",)), replace(ONE, nbytes=1 << 60)])
def test_a_claim_that_does_not_fit_the_group_is_refused(run: Run, claim: ResultClaim) -> None:
    own = (PEERS[0].payload(run.spec, 0, 1),)
    run.refuse(Report(PEERS[0].peer, 0, 1, own, (), claim), ErrorCode.BAD_REQUEST)


def test_a_sum_of_nothing_is_refused(run: Run) -> None:
    nobody = replace(ONE, without=tuple(sorted(peer.peer for peer in PEERS)))
    run.refuse(Report(PEERS[0].peer, 0, 1, (), (), nobody), ErrorCode.BAD_REQUEST)


def test_a_run_that_gathers_takes_no_result() -> None:
    run = started(2, stages=1)
    for peer in PEERS[:2]:
        offer(run, peer, peer.payload(run.spec, 0, 1))
    run.refuse(Report(PEERS[0].peer, 0, 1, (), (), ONE), ErrorCode.BAD_REQUEST)


def test_the_log_of_a_reduction_is_read_again(run: Run) -> None:
    for peer in PEERS:
        report(run, peer, replace(ONE, without=(PEERS[3].peer,)))
    log = [event for event in run.events if not isinstance(event, PeerSeen)]
    assert [event_codec.decode(*event_codec.encode(event)) for event in log] == log
