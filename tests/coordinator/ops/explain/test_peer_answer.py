"""Why a peer does not train: the cause, with figures and the events from which it follows."""

from __future__ import annotations

import pytest

from coordinator.run.state import events
from coordinator.run.state.commands import (
    Ban,
    Drain,
    Leave,
    Retreat,
    Start,
)
from protocol.types import Role
from tests.builders import spec_of
from tests.support.coordinator_run import (
    Run,
    measure,
    pass_time,
    play_rounds,
    started,
    started_and_attested,
)
from tests.support.explaining import text_of
from tests.support.explaining_runs import A, B, C, D, E, asked, timed_round, usual_rounds


class TestPeer:
    def test_a_peer_that_trains(self) -> None:
        run = started(3, rounds=20)
        usual_rounds(run)
        found = asked(run)(B.peer[-8:])
        assert found.title == f"Peer {B.peer} trains as a full replica in replica-1, stages 0-1"
        assert "Its last payload that counts is in the decision of round 4" in text_of(found)

    def test_a_banned_peer(self) -> None:
        run = started(3, rounds=20)
        usual_rounds(run)
        run.accept(Ban(B.peer, "it sends rubbish"))
        ask = asked(run)
        found = ask(f"..{B.peer[-6:]}")
        assert found.title.endswith("is banned")
        assert "The operator has banned it: it sends rubbish" in found.sentences[0].text
        assert isinstance(ask.cited(found, "has banned it")[0], events.PeerBanned)

    def test_a_quarantined_peer_with_each_strike_and_its_event(self) -> None:
        run = started(3, rounds=20)
        for _ in range(3):
            timed_round(run, {A: 10.0, B: 10.5, C: 10.2}, rejected=B)
        ask = asked(run)
        found = ask(B.peer)
        assert found.title.endswith("is in quarantine")
        strikes = [each for each in found.sentences if "got a strike" in each.text]
        assert len(strikes) == 3
        for number, each in enumerate(strikes, start=1):
            assert f"in round {number}: its values are not finite" in each.text
            (event,) = (ask.log[cited - 1] for cited in each.events)
            assert (type(event), event.peer) == (events.PeerStruck, B.peer)

    def test_a_peer_that_was_lost_or_has_left(self) -> None:
        run = started(3, rounds=20, timing__lost_after=15.0)
        usual_rounds(run)
        run.accept(Leave(C.peer, "no power"))
        pass_time(run, 20.0, A)
        lost, left = asked(run)(B.peer), asked(run)(C.peer)
        assert lost.title.endswith("is gone")
        assert "is lost: silent for" in text_of(lost)
        assert "left: no power" in text_of(left)

    def test_a_draining_peer(self) -> None:
        run = started(3, rounds=20)
        run.accept(Drain(B.peer, "a test"))
        text = text_of(asked(run)(B.peer))
        assert "leaves after this round" in text
        assert "It has asked to leave" in text

    def test_a_spare_without_memory_for_any_vacancy(self) -> None:
        run = started_and_attested(1, 1, rounds=20)
        play_rounds(run, 1)
        run.accept(E.join(run.spec, Role.STAGE, memory_bytes=1000))
        assert E.peer not in run.state.reservations
        ask = asked(run)
        found = ask(E.peer)
        assert "It is a spare: no assignment is reserved for it" in text_of(found)
        assert "0.0 MB of its memory may be used" in text_of(found)
        assert isinstance(ask.cited(found, "It is a spare")[0], events.PeerJoined)

    def test_a_spare_whose_neighbours_cannot_be_reached(self) -> None:
        run = started_and_attested(1, 1, rounds=20)
        play_rounds(run, 1)
        run.accept(D.join(run.spec, Role.STAGE, endpoint=""))
        run.accept(E.join(run.spec, Role.STAGE, endpoint=""))
        text = text_of(asked(run)(E.peer))
        assert "stage" in text
        assert "waits" in text or "has an endpoint" in text

    def test_a_follower_that_must_catch_up(self) -> None:
        run = started_and_attested(1, 1, rounds=20)
        play_rounds(run, 4)
        run.accept(D.join(run.spec, Role.STAGE))
        run.accept(E.join(run.spec, Role.STAGE))
        text = text_of(asked(run)(E.peer))
        assert "It follows the rounds of stage" in text
        assert "it has to attest the anchors after round 3, and has attested of stage" in text

    def test_a_retreat_with_its_reason(self) -> None:
        run = started_and_attested(2, 1, rounds=20)
        play_rounds(run, 2)
        run.accept(Retreat(C.peer, 1, "the neighbour does not answer"))
        ask = asked(run)
        found = ask(C.peer)
        assert "It has given up its part in plan 1: the neighbour does not answer" in text_of(found)
        (event,) = ask.cited(found, "It has given up")
        assert isinstance(event, events.PeerRetreated)

    def test_a_slow_peer_is_compared_with_those_of_its_role(self) -> None:
        run = started(3, rounds=20)
        for peer, flops in ((A, 4e9), (B, 1e9), (C, 4e9)):
            measure(run, peer, flops=flops, bandwidth=1e6)
        text = text_of(asked(run)(B.peer))
        assert "It computes at 1 GFLOP/s; the median of the other full replicas is 4 GFLOP/s" in text

    def test_before_the_run_begins(self) -> None:
        run = Run(spec_of(2, 3))
        run.accept(Start())
        run.accept(A.join(run.spec))
        found = asked(run)(A.peer)
        assert found.title.endswith("waits as a full replica for the run to begin")
        assert "waiting for 2 more full replicas" in text_of(found)

    @pytest.mark.parametrize(
        "hostile", ["\x1b[2J\x1b[31mred", "<script>alert(1)</script>", "[bold]x[/]", "x" * 100_000]
    )
    def test_what_a_peer_says_is_text_and_cut(self, hostile: str) -> None:
        run = started(3, rounds=20)
        run.accept(Leave(B.peer, hostile))
        found = asked(run)(B.peer)
        for each in found.sentences:
            assert each.text.isprintable()
            assert len(each.text) <= 601
