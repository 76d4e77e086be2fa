"""The answers name the cause, with figures, and the events from which it follows."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.state import events
from coordinator.state.commands import (
    Attest,
    Ban,
    Drain,
    Leave,
    Offer,
    PauseRun,
    RaiseAlarm,
    Report,
    ResumeRun,
    Retreat,
    Start,
    Tick,
    UpdateAddresses,
)
from protocol.errors import ErrorCode, HetnodeError
from protocol.status import Measurement
from protocol.types import PausedBy, Reachability, Rejection, Role
from tests.builders import Keyed, anchor_of, keyed, spec_of
from tests.support.coordinator_run import (
    Run,
    join,
    measure,
    pass_time,
    play_rounds,
    started,
    started_and_attested,
)
from tests.support.explaining import Asked, text_of

A, B, C, D, E = (keyed(i) for i in range(5))


def asked(run: Run) -> Asked:
    return Asked(run.state, run.events, run.now)


def timed_round(
    run: Run, offers: dict[Keyed, float], reports: float = 1.0, rejected: Keyed | None = None
) -> None:
    """A round of full replicas that offer so many seconds after its begin; then they report and attest."""
    number, began = run.state.current_round, run.now
    stages = range(run.spec.swarm.stages)
    payloads = {
        (peer, stage): peer.payload(run.spec, stage, number, epoch=run.state.plans[-1].epoch)
        for peer in offers
        for stage in stages
    }
    for peer, seconds in sorted(offers.items(), key=lambda each: each[1]):
        run.now = began + seconds
        for stage in stages:
            run.accept(Offer(peer.peer, payloads[peer, stage]))
    run.now += reports
    for stage in stages:
        all_of_stage = [payloads[peer, stage] for peer in offers]
        held = tuple(each for each in all_of_stage if rejected is None or each.owner != rejected.peer)
        for peer in offers:
            own = peer is rejected
            bad = (
                ()
                if rejected is None or own
                else (Rejection(payloads[rejected, stage], "its values are not finite"),)
            )
            report = Report(peer.peer, stage, number, tuple(all_of_stage) if own else held, bad)
            run.send(report)  # refused after a quarantine
    for peer in offers:
        for stage in stages:
            run.send(Attest(peer.peer, stage, number, "stage", anchor_of(stage, number)))


def usual_rounds(run: Run, count: int = 4) -> None:
    for _ in range(count):
        timed_round(run, {A: 10.0, B: 10.5, C: 10.2})


class TestRound:
    def test_a_slow_replica_is_named_with_its_usual_time(self) -> None:
        run = started(3, rounds=20)
        usual_rounds(run)
        timed_round(run, {A: 10.0, B: 19.0, C: 10.2})
        ask = asked(run)
        found = ask(5)
        assert found.title == "Round 5 took 20 s, 1.7 times the median of the 4 rounds before (12 s)"
        text = text_of(found)
        assert "8.5 s more than usual went into waiting for the payloads of the other replicas" in text
        assert "replica-1 was last: it offered 19 s after the round began, 8.8 s after replica-2" in text
        assert "in the rounds before it took 10 s (median)" in text
        offers = ask.cited(found, "was last")
        assert {each.descriptor.owner for each in offers} == {B.peer, C.peer}
        assert {each.descriptor.round_number for each in offers} == {5}
        assert "timing.straggler" in found.sentences[-1].text

    def test_a_machine_that_is_always_slow_is_compared_with_the_others(self) -> None:
        run = started(3, rounds=20, grouping__balance=False)
        for peer, flops in ((A, 4e9), (B, 1e9), (C, 4e9)):
            measure(run, peer, flops=flops)
        for _ in range(4):
            timed_round(run, {A: 10.0, B: 18.0, C: 10.2})
        text = text_of(asked(run)(4))
        assert "It is always slower than the others, which took 10 s" in text
        assert f"..{B.peer[-8:]} computes at 1 GFLOP/s" in text
        assert "4 GFLOP/s" in text

    def test_the_measurement_of_that_round_tells_how_long_it_computed(self) -> None:
        run = started(3, rounds=20)
        usual_rounds(run)
        timed_round(run, {A: 10.0, B: 19.0, C: 10.2})
        busy = Measurement(B.peer, 5, 1, 0, inner_seconds=18.0, compute_seconds=3.0)
        text = text_of(asked(run)(5, [busy]))
        assert f"Of the 18 s of its inner phase, ..{B.peer[-8:]} computed for 3.0 s" in text

    def test_a_lost_member_is_why_its_replica_offered_nothing(self) -> None:
        run = started(3, rounds=20, timing__lost_after=15.0)
        usual_rounds(run)
        pass_time(run, 20.0, A, C)
        timed_round(run, {A: 1.0, C: 1.2})
        ask = asked(run)
        found = ask(5)
        text = text_of(found)
        assert f"replica-1 (..{B.peer[-8:]}) offered nothing" in text
        assert "is lost: silent for" in text
        lost = ask.cited(found, "offered nothing")
        assert [type(each) for each in lost] == [events.PeerLost]
        assert lost[0].peer == B.peer
        assert "timing.lost_after" in found.sentences[-1].text

    def test_an_address_change_of_the_late_member_is_told(self) -> None:
        run = started(3, rounds=20)
        usual_rounds(run)
        run.accept(UpdateAddresses(B.peer, "h:2", Reachability.OPEN, "h:2", ""))
        timed_round(run, {A: 10.0, B: 19.0, C: 10.2})
        ask = asked(run)
        found = ask(5)
        assert "has other addresses (h:2, open)" in text_of(found)
        (moved,) = ask.cited(found, "has other addresses")
        assert isinstance(moved, events.AddressesChanged)

    def test_a_rejected_payload_is_told_with_its_reason(self) -> None:
        run = started(3, rounds=20)
        usual_rounds(run)
        timed_round(run, {A: 10.0, B: 10.5, C: 10.2}, rejected=B)
        ask = asked(run)
        found = ask(5)
        assert f"The payload of replica-1 (..{B.peer[-8:]}) for stages 0, 1 did not count" in text_of(found)
        assert "2 peers rejected it: its values are not finite" in text_of(found)
        cited = ask.cited(found, "did not count")
        assert {type(each) for each in cited} == {events.PayloadOffered, events.PayloadRejected}

    def test_an_abort_comes_first_with_its_reason(self) -> None:
        run = started(3, rounds=20)
        usual_rounds(run)
        began = run.now
        run.now = began + 10
        run.accept(Offer(A.peer, A.payload(run.spec, 0, 5)))
        run.accept(Report(A.peer, 0, 5, (A.payload(run.spec, 0, 5),)))
        pass_time(run, 600.0, A, B, C)
        found = asked(run)(5)
        assert found.sentences[0].text.startswith("It was ABORTED at stage ")
        aborted = [asked(run).log[number - 1] for number in found.sentences[0].events]
        assert aborted
        assert all(isinstance(each, events.RoundAborted) for each in aborted)
        assert (
            "offered nothing before the round closed; in the rounds before it took 10 s (median)"
            in text_of(found)
        )

    def test_a_start_of_the_coordinator_within_the_round_is_told(self) -> None:
        run = started(3, rounds=20)
        usual_rounds(run)
        run.now += 90
        run.accept(Start())
        timed_round(run, {A: 10.0, B: 10.5, C: 10.2})
        ask = asked(run)
        found = ask(5)
        assert "nothing is in the log for 90 s before that" in text_of(found)
        assert isinstance(ask.cited(found, "nothing is in the log")[-1], events.CoordinatorStarted)

    def test_a_slow_gathering_names_the_last_report(self) -> None:
        run = started(2, rounds=20, stages=1)
        for _ in range(4):
            timed_round(run, {A: 10.0, B: 10.5}, reports=0.5)
        payloads = tuple(peer.payload(run.spec, 0, 5) for peer in (A, B))
        run.now += 10
        for payload in payloads:
            run.accept(Offer(payload.owner, payload))
        run.accept(Report(A.peer, 0, 5, payloads))
        run.now += 8
        run.accept(Report(B.peer, 0, 5, payloads))
        text = text_of(asked(run)(5))
        assert "7.5 s more than usual went into gathering the payloads: 8.0 s instead of 0.50 s" in text
        assert f"..{B.peer[-8:]} was the last to report the payloads, 8.0 s after the one before" in text

    def test_a_new_plan_is_told_with_its_reason(self) -> None:
        run = started_and_attested(2, 1, rounds=20)
        play_rounds(run, 2)
        run.accept(Leave(C.peer, "the owner needs the machine"))
        play_rounds(run, 1)
        found = asked(run)(3)
        assert (
            "The next round got another plan, 2: goes on without replica-2, which lost a member"
            in text_of(found)
        )
        assert "the owner needs the machine" in text_of(found)

    def test_the_open_round_is_explained_so_far(self) -> None:
        run = started(3, rounds=20)
        usual_rounds(run)
        run.now += 30
        assert asked(run)(5).title.endswith("and is not decided")

    def test_the_first_round_has_nothing_to_compare_with(self) -> None:
        run = started(3, rounds=20)
        timed_round(run, {A: 10.0, B: 10.5, C: 10.2})
        assert asked(run)(1).title == "Round 1 took 12 s"


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


class TestNow:
    def test_the_title_says_what_it_waits_for_and_a_sentence_since_when(self) -> None:
        run = started(3, rounds=20)
        usual_rounds(run)
        run.now += 10
        for stage in (0, 1):
            run.accept(Offer(A.peer, A.payload(run.spec, stage, 5)))
        run.now += 3
        ask = asked(run)
        found = ask("now")
        assert found.title == "Training: round 5 of 20, waiting for replica-1, replica-2 at stage 0"
        assert "The first payload of this round was offered 3.0 s ago; it waits at most" in text_of(found)
        (offer,) = ask.cited(found, "The first payload")
        assert isinstance(offer, events.PayloadOffered)

    def test_a_late_replica_is_compared_with_itself(self) -> None:
        run = started(3, rounds=20)
        usual_rounds(run)
        run.now += 10
        for stage in (0, 1):
            run.accept(Offer(A.peer, A.payload(run.spec, stage, 5)))
            run.accept(Offer(C.peer, C.payload(run.spec, stage, 5)))
        run.now += 8
        assert "replica-1 has trained for 18 s and usually needs 10 s" in text_of(asked(run)("now"))

    def test_twice_the_speed_of_the_slowest_machine_is_predicted(self) -> None:
        run = started(3, rounds=20)
        for peer, flops in ((A, 4e6), (B, 1e6), (C, 4e6)):
            measure(run, peer, flops=flops, bandwidth=1e6)
        play_rounds(run, 1)
        text = text_of(asked(run)("now"))
        assert "Prediction of the cost model: a round takes" in text
        assert f"If ..{B.peer[-8:]} (0.001 GFLOP/s) computed twice as fast" in text
        assert "(prediction)" in text

    def test_a_faster_line_a_narrower_k_and_a_spare_are_predicted(self) -> None:
        run = started_and_attested(1, 1, rounds=20, link__k=16)
        for peer in (A, B, C):
            measure(run, peer, flops=1e9, bandwidth=1e6)
        measure(run, B, flops=1e9, bandwidth=1e4)
        play_rounds(run, 1)
        join(run, D)
        measure(run, D, flops=1e9, bandwidth=1e6)
        text = text_of(asked(run)("now"))
        assert f"If the line from ..{B.peer[-8:]} to ..{C.peer[-8:]} (0.1 Mb/s) carried twice as much" in text
        assert "With k = 8 instead of 16" in text
        assert f"With the spare ..{D.peer[-8:]} in the place of ..{B.peer[-8:]}" in text

    @pytest.mark.parametrize(
        ("ladder", "narrower"),
        [({}, 16), ({"link__least_k": 4, "link__most_k": 8, "link__uncompressed": True}, 8)],
    )
    def test_a_compressed_link_is_predicted_in_the_place_of_an_uncompressed_one(
        self, ladder: dict[str, Any], narrower: int
    ) -> None:
        run = started_and_attested(1, 1, rounds=20, link__k=0, **ladder)
        for peer in (A, B, C):
            measure(run, peer, flops=1e9, bandwidth=1e4)
        text = text_of(asked(run)("now"))
        assert f"With k = {narrower} instead of uncompressed activations on the link" in text
        assert "its links: uncompressed downstream" in text_of(asked(run)(B.peer))

    def test_a_stalled_run_waits_since_its_member_went(self) -> None:
        run = started_and_attested(0, 1, rounds=20)
        play_rounds(run, 1)
        run.accept(Leave(A.peer, "no power"))
        run.now += 6
        run.accept(Tick())
        ask = asked(run)
        found = ask("now")
        assert "no complete replica is left" in found.title
        assert "It waits since" in text_of(found)
        assert isinstance(ask.cited(found, "It waits since")[0], events.PeerLeft)

    def test_before_the_run_begins(self) -> None:
        run = Run(spec_of(2, 3))
        run.accept(Start())
        run.accept(A.join(run.spec))
        run.now += 30
        found = asked(run)("")
        assert found.title.startswith("Waiting for 2 more full replicas")
        assert "joined 30 s ago as a full replica" in text_of(found)

    def test_a_finished_run(self) -> None:
        run = started(3, rounds=2)
        usual_rounds(run, 2)
        run.accept(Tick())
        assert "finished" in asked(run)("now").title.lower()


class TestPause:
    def test_a_paused_run_says_since_when_and_how_it_goes_on(self) -> None:
        run = self._paused()
        run.now += 600
        ask = asked(run)
        found = ask("now")
        assert "PAUSED before round 6 of 20 by its operator: the loss has risen" in found.title
        assert "It was paused 10 min 12 s ago; 'hetnode run resume' lets it go on" in text_of(found)
        assert isinstance(ask.cited(found, "It was paused")[0], events.RunPaused)

    def test_the_round_after_it_says_how_long_the_run_stood_still(self) -> None:
        run = self._paused()
        run.now += 600
        run.accept(ResumeRun())
        timed_round(run, {A: 10.0, B: 10.5, C: 10.2})
        ask = asked(run)
        found = ask(6)
        assert "it stood still for 10 min" in text_of(found)
        kinds = [type(each) for each in ask.cited(found, "it stood still")]
        assert kinds == [events.RunPaused, events.RunResumed]

    def _paused(self) -> Run:
        run = started(3, rounds=20)
        usual_rounds(run)
        run.accept(PauseRun(PausedBy.OPERATOR, "the loss has risen"))
        timed_round(run, {A: 10.0, B: 10.5, C: 10.2})
        return run


class TestEvents:
    def test_what_an_event_says_with_its_time(self) -> None:
        run = started(3, rounds=20)
        found = asked(run)("event 1, 2")
        assert [each.events for each in found.sentences] == [(1,), (2,)]
        assert found.sentences[0].text == "1970-01-01 00:16:40 UTC: the coordinator listens."

    @pytest.mark.parametrize(
        "question",
        [
            "0",
            "7",
            "99999999999",
            "event 0",
            "event 1000000",
            f"event {' 1' * 65}x",
            "Qm",
            "..",
            "nobody",
            "é" * 10_000,
            "event",
            "-1",
        ],
    )
    def test_what_is_not_there_is_one_message(self, question: str) -> None:
        run = started(3, rounds=20)
        with pytest.raises(HetnodeError) as refusal:
            asked(run)(question)
        assert refusal.value.code is ErrorCode.BAD_OPTION
        assert len(refusal.value.cause) < 300


def test_a_question_reads_only_its_rounds() -> None:
    run = started(3, rounds=60)
    usual_rounds(run, 30)
    ask = asked(run)
    read: list[int] = []
    ask.read = lambda first, last, kinds=(): read.extend(range(first, last + 1)) or []  # type: ignore[method-assign,assignment]
    ask(20)
    own = {number for marks in ask.index.rounds[15:20] for number in range(marks.first, marks.last + 1)}
    assert set(read) <= own


def test_a_very_long_round_is_read_from_its_end() -> None:
    run = started(3, rounds=20)
    for _ in range(11_000):
        run.events.append(events.AddressesChanged(run.now, A.peer, "h:1", Reachability.OPEN, "h:1", ""))
    usual_rounds(run, 1)
    ask = asked(run)
    assert len(ask(1).sentences) < 33


def test_an_alarm_is_in_the_answers() -> None:
    run = started_and_attested(2, rounds=9)
    play_rounds(run, 2)
    run.accept(RaiseAlarm(2, 1, "the loss rose to 9.0.", False))
    ask = asked(run)
    assert "There is an alarm: the loss rose to 9.0. The last healthy round was 1" in text_of(ask("now"))
    assert "An alarm was raised about round 2: the loss rose to 9.0." in text_of(ask(3))
    assert isinstance(ask.cited(ask(3), "An alarm was raised")[0], events.AlarmRaised)
