"""Peers without an invite: whom an open run lets in, the places of those that wait, and what they count."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.membership.open_places import (
    HOURS_HELD,
    MOST_WAITING,
    PLACE_SECONDS,
    REFRESH_SECONDS,
    SCORED_BY_EACH,
    SEAT_SECONDS,
    OpenTerms,
    place_text,
    waiting,
)
from coordinator.placement.rules import peer_rests_until
from coordinator.run.state.apply import replay
from coordinator.run.state.commands import (
    Attest,
    Ban,
    CreateInvite,
    Enroll,
    Leave,
    Offer,
    Report,
    Start,
    Tick,
    Weigh,
)
from coordinator.run.state.events import PeerQuarantined, PeerStruck, PlaceAsked
from coordinator.run.state.state import State
from coordinator.status.causes import peer_cause
from coordinator.status.messages import run_message
from coordinator.status.run_status import run_status
from protocol.errors import ErrorCode
from protocol.status import CauseCode
from protocol.types import Committed, PeerId, Rejection, Role
from tests.builders import Keyed, anchor_of, keyed
from tests.support.coordinator_run import (
    ALL,
    Run,
    attest,
    beat_for,
    members_by_replica,
    play_round,
    play_rounds,
    started,
    started_and_attested,
)

INVITED, STRANGERS = ALL[:3], ALL[3:]
HOUR = 3600.0


def ask(run: Run, peer: Keyed, members: int = 64, joins: int = 8, source: str = "") -> None:
    """As the API does for each enrollment and each join; by default every peer has an address of its own."""
    run.accept(OpenTerms(members, joins).ask(peer.peer, source or f"source of {peer.peer}"))


def wait(run: Run, peer: Keyed, members: int = 64, joins: int = 8, source: str = "") -> str:
    """Ask, and return why there is no room yet."""
    asked = OpenTerms(members, joins).ask(peer.peer, source or f"source of {peer.peer}")
    refusal = run.send(asked).refusal
    assert refusal is not None
    assert refusal.code is ErrorCode.WAITING_LIST, refusal
    assert ("keeps its place" in refusal.remedy) == (peer.peer in run.state.open_places)
    return refusal.cause


def come(run: Run, peer: Keyed, members: int = 64) -> None:
    ask(run, peer, members)
    run.accept(peer.join(run.spec))


def go(run: Run, peer: Keyed) -> None:
    run.accept(Leave(peer.peer, "asked to leave"))


def is_unproven(run: Run, peer: Keyed) -> bool:
    return run.state.is_unproven(peer.peer)


@pytest.fixture
def run() -> Run:
    """Three replicas of invited members train."""
    return started(replicas=3, stages=1)


def test_a_run_that_is_not_open_lets_in_nobody_without_an_invite(run: Run) -> None:
    refusal = run.refuse(OpenTerms(0, 0).ask(STRANGERS[0].peer, "a"), ErrorCode.INVITE_REVOKED)
    assert "not open" in refusal.cause


def test_who_is_in_stays_where_the_operator_lowers_the_cap(run: Run) -> None:
    """A live peer joins again as soon as its coordinator is back, and is no peer that waits."""
    a, b, c = STRANGERS[:3]
    for each in (a, b, c):
        come(run, each)
    ask(run, c, 2)
    go(run, c)
    assert "place 1 of 1" in wait(run, c, 2)
    go(run, a)
    go(run, b)
    run.now += SEAT_SECONDS
    ask(run, c, 2)


def test_strangers_are_admitted_up_to_the_cap_and_then_in_order(run: Run) -> None:
    a, b, c, d = STRANGERS[:4]
    come(run, a, 2)
    come(run, b, 2)
    assert wait(run, c, 2).startswith("place 1 of 1 in the waiting list")
    assert wait(run, d, 2).startswith("place 2 of 2")
    assert c.peer not in run.state.enrolled  # no certificate, and so no call but to ask again
    go(run, a)
    run.now += SEAT_SECONDS - 1
    assert wait(run, c, 2).startswith("place 1 of 2")  # the room of who has just left is kept
    run.now += 1
    assert wait(run, d, 2).startswith("place 2 of 2")  # c is first, also if d asks first
    ask(run, c, 2)
    assert wait(run, a, 2).startswith("place 1 of 2")  # it came before d, and has lost no place in the order
    assert wait(run, d, 2).startswith("place 2 of 2")


def test_places_survive_restarts_of_both_sides(run: Run) -> None:
    a, b, c = STRANGERS[:3]
    come(run, a, 1)
    wait(run, b, 1)
    wait(run, c, 1)
    again = replay(State(run.spec, run.spec.name), run.events)
    assert replace(again, last_seen=run.state.last_seen) == run.state
    run.now += 20 * HOUR  # the coordinator was away
    run.accept(Start())
    assert wait(run, c, 1).startswith("place 2 of 2")
    assert wait(run, b, 1).startswith("place 1 of 2")
    run.now += PLACE_SECONDS - 1  # so were the nodes
    wait(run, c, 1)
    assert wait(run, b, 1).startswith("place 1 of 2")
    assert wait(run, c, 1).startswith("place 2 of 2")
    assert [*run.state.open_places] == [a.peer, b.peer, c.peer]


def test_who_does_not_ask_for_a_day_loses_its_place(run: Run) -> None:
    a, b, c = STRANGERS[:3]
    come(run, a, 1)
    wait(run, b, 1)
    wait(run, c, 1)
    run.now += PLACE_SECONDS / 2
    wait(run, c, 1)
    run.now += PLACE_SECONDS / 2
    assert wait(run, c, 1).startswith("place 1 of 1")
    assert b.peer not in run.state.open_places
    assert b.peer not in run.state.discounted
    assert a.peer in run.state.open_places  # it is here
    assert wait(run, b, 1).startswith("place 2 of 2")


def test_who_waits_and_does_not_ask_lets_others_by_and_keeps_its_place(run: Run) -> None:
    a, b, c, d = STRANGERS[:4]
    come(run, a, 1)
    wait(run, b, 1)
    wait(run, c, 1)
    run.now += SEAT_SECONDS
    go(run, a)
    run.now += SEAT_SECONDS
    ask(run, c, 1)
    assert wait(run, b, 1).startswith("place 1 of 1")
    assert wait(run, d, 1).startswith("place 2 of 2")
    assert wait(run, a, 1).startswith("place 1 of 3")


def test_questions_do_not_fill_the_log(run: Run) -> None:
    a, b = STRANGERS[:2]
    come(run, a, 1)
    for _ in range(100):
        wait(run, b, 1)
        run.now += REFRESH_SECONDS / 50
    assert sum(isinstance(each, PlaceAsked) and each.peer == b.peer for each in run.events) == 2


def test_a_source_gets_few_places_in_an_hour_and_at_all_whatever_its_peers_do(run: Run) -> None:
    peers = [keyed(number) for number in range(20, 40)]
    for peer in peers[:2]:
        ask(run, peer, joins=2, source="192.0.2.1")
    go_on = "no place yet: 2 peers came from 192.0.2.1 within an hour, at most 2 may."
    assert wait(run, peers[2], joins=2, source="192.0.2.1") == go_on
    assert peers[2].peer not in run.state.open_places  # nothing is kept of it
    ask(run, peers[3], joins=2, source="2001:db8::/64")
    ask(run, peers[0], joins=2, source="192.0.2.2")  # who moves takes its place along, and frees none
    run.accept(Ban(peers[1].peer, "rubbish"))
    assert wait(run, peers[2], joins=2, source="192.0.2.1") == go_on
    held = 2
    for number in range(4, 4 + 2 * (HOURS_HELD - 1), 2):
        run.now += HOUR
        for peer in peers[number : number + 2]:
            run.send(OpenTerms(64, 2).ask(peer.peer, "192.0.2.1"))
            held += 1
    run.now += HOUR
    assert wait(run, peers[2], joins=2, source="192.0.2.1").startswith(f"no place yet: {held} peers from")


def test_the_waiting_list_is_bounded(run: Run) -> None:
    ask(run, STRANGERS[0])
    place = replace(run.state.open_places[STRANGERS[0].peer], admitted=False)
    crowd = {PeerId(f"peer {number}"): place for number in range(MOST_WAITING + 1)}
    run.state = replace(run.state, open_places=crowd)
    assert "full" in wait(run, STRANGERS[1], members=1)
    assert len(run.state.open_places) == MOST_WAITING + 1


def test_no_more_strangers_come_than_the_members_with_weight_can_measure(run: Run) -> None:
    crowd = [keyed(number) for number in range(20, 20 + 3 * SCORED_BY_EACH)]
    for peer in crowd:
        ask(run, peer)
    assert "place 1 of 1" in wait(run, STRANGERS[0])


def test_before_the_start_strangers_wait(run: Run) -> None:
    early = Run(run.spec)
    early.accept(Start())
    first = "members with an invite have to train first"
    assert wait(early, STRANGERS[0]) == f"place 1 of 1 in the waiting list, no estimate yet; {first}."
    for peer in INVITED:
        early.accept(peer.join(early.spec))
    ask(early, STRANGERS[0])


def test_the_estimate_follows_from_how_long_the_others_have_been_there(run: Run) -> None:
    a, b, c, d = STRANGERS[:4]
    come(run, a, 2)
    come(run, b, 2)
    run.now += 4 * HOUR
    wait(run, c, 2)
    assert wait(run, d, 2) == "place 2 of 2 in the waiting list, about 4.5 h at the present pace."
    first, second = waiting(run.state, run.now)
    assert (first.peer, first.place, first.seconds) == (c.peer, 1, 2 * HOUR + SEAT_SECONDS)
    assert place_text(replace(second, seconds=61.0), 9).endswith("about 1 min at the present pace")
    assert run_status(run.state, (), run.now, 0.0).waiting == (first, second)


def test_a_stranger_trains_at_weight_0_is_measured_and_counts_when_its_scores_are_good(run: Run) -> None:
    stranger = STRANGERS[0]
    come(run, stranger)
    play_round(run, (stranger,))
    play_round(run, (stranger,))
    play_round(run)
    number = run.state.current_round - 1
    assert stranger.peer in run.state.round_of(0, number).offers
    assert stranger.peer not in _counted(run, number)
    assert "of peers with bad scores or none" in run.state.decisions[0, number].reason
    cause = peer_cause(run.state, stranger.peer)
    assert cause is not None
    assert cause.code is CauseCode.DISCOUNTED
    run.accept(Weigh(stranger.peer, number, True, 0.9))
    play_round(run)
    assert stranger.peer in _counted(run, number + 1)
    go(run, stranger)  # its weight is that of its identity, as long as it has its place
    come(run, stranger)
    assert not is_unproven(run, stranger)


def test_a_stranger_that_is_bad_is_struck_and_a_new_identity_begins_at_nothing(run: Run) -> None:
    a, b = STRANGERS[:2]
    come(run, a)
    for number in (1, 2, 3):
        run.accept(Weigh(a.peer, number, False, 0.1))
    assert [event.peer for event in run.events if isinstance(event, PeerQuarantined)] == [a.peer]
    run.refuse(OpenTerms(64, 8).ask(a.peer, "a"), ErrorCode.QUARANTINED)
    come(run, b)
    assert is_unproven(run, b)


def test_an_invite_makes_a_member_of_a_stranger(run: Run) -> None:
    stranger = STRANGERS[0]
    come(run, stranger, members=1)
    run.accept(CreateInvite("invite", "a" * 64, 1, 60.0, None))
    run.accept(Enroll(stranger.peer, "invite", "a" * 64))
    assert not is_unproven(run, stranger)
    ask(run, STRANGERS[1], members=1)  # it takes no room of theirs
    ask(run, stranger, members=0)  # and needs none


def test_a_stranger_is_no_relay(run: Run) -> None:
    ask(run, STRANGERS[0])
    run.refuse(STRANGERS[0].join(run.spec, Role.RELAY), ErrorCode.BAD_REQUEST)


def test_strangers_in_the_majority_have_no_say(run: Run) -> None:
    """They reject honest payloads, deny that they hold them, attest other anchors, and are silent."""
    crowd = STRANGERS[:6]
    for peer in crowd:
        come(run, peer)
    play_round(run, crowd)
    play_round(run, crowd)
    number, owners = run.state.current_round, (*INVITED, *crowd)
    payloads = {peer.peer: peer.payload(run.spec, 0, number) for peer in owners}
    run.now += 200.0
    for peer in reversed(owners):
        run.accept(Offer(peer.peer, payloads[peer.peer]))
    bad = tuple(Rejection(payloads[peer.peer], "rubbish") for peer in INVITED)
    for peer in crowd[:-1]:
        run.accept(Report(peer.peer, 0, number, (payloads[peer.peer],), bad))
    for peer in INVITED:
        run.accept(Report(peer.peer, 0, number, tuple(payloads.values())))
    assert _counted(run, number) == {peer.peer for peer in INVITED}  # and nobody waits for the last stranger
    assert not [event for event in run.events if isinstance(event, PeerStruck)]
    for peer in crowd:
        run.accept(Attest(peer.peer, 0, number, "stage", anchor_of(0, number + 100)))
    for peer in INVITED:
        run.accept(Attest(peer.peer, 0, number, "stage", anchor_of(0, number)))
    assert {peer for peer, *_ in run.state.diverged} == {peer.peer for peer in crowd}


def test_strangers_alone_spend_no_rounds(run: Run) -> None:
    stranger = STRANGERS[0]
    come(run, stranger)
    play_round(run, (stranger,))
    play_round(run, (stranger,))
    number = run.state.current_round
    for peer in INVITED:
        go(run, peer)
    plans = len(run.state.plans)
    run.now += 100.0
    run.send(Offer(stranger.peer, stranger.payload(run.spec, 0, number)))
    for _ in range(20):
        run.now += 100.0
        run.accept(Tick({stranger.peer: run.now}))
    assert run.state.current_round == number
    assert len(run.state.plans) <= plans + 1
    assert "no complete replica" in run_message(run.state)


@pytest.mark.parametrize("with_stranger", [False, True])
def test_who_rests_comes_back_where_no_other_replica_counts(with_stranger: bool) -> None:
    run = started_and_attested(replicas=2, stages=1, rounds=20)
    rests, goes, stranger = ALL[0], ALL[1], STRANGERS[0]
    if with_stranger:
        come(run, stranger)
        attest(run, stranger)
    play_rounds(run, 2)
    for _ in range(3):
        go(run, rests)
        run.accept(rests.join(run.spec))
        attest(run, rests)
        play_round(run, (rests,))
    number = run.state.current_round
    assert peer_rests_until(run.state, rests.peer) > number
    go(run, goes)
    beat_for(run, 20.0, rests, *((stranger,) if with_stranger else ()))
    assert run.state.current_round == number
    assert run.state.takes_part(rests.peer, number)


def test_what_is_left_of_two_pipelines_makes_one_where_no_other_replica_counts() -> None:
    """A stranger has the state of the stage that they lack, which its digest proves."""
    run = started_and_attested(replicas=0, pipelines=2, stages=2, rounds=20)
    stranger = keyed(9)
    come(run, stranger)
    attest(run, stranger)
    play_rounds(run, 2)
    chains = [members for members in members_by_replica(run).values() if len(members) == 2]
    first = [peer for peer in ALL if peer.peer in [members[0] for members in chains]]
    for _, last in chains:
        run.accept(Leave(last, "gone"))
    number = run.state.current_round
    for _ in range(4):
        beat_for(run, 20.0, *first, stranger)
        for peer in first:
            attest(run, peer)
    assert run.state.has_complete_replica(number)


def _counted(run: Run, number: int) -> set[str]:
    decision = run.state.decisions[0, number]
    assert isinstance(decision, Committed)
    return {entry.descriptor.owner for entry in decision.entries}
