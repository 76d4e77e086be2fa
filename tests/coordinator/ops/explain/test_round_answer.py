"""Why a round took so long or was aborted: the cause, with figures and the events from which it follows."""

from __future__ import annotations

from coordinator.run.state import events
from coordinator.run.state.commands import (
    Leave,
    Offer,
    Report,
    Start,
    UpdateAddresses,
)
from protocol.status import Measurement
from protocol.types import Reachability
from tests.support.coordinator_run import (
    measure,
    pass_time,
    play_rounds,
    started,
    started_and_attested,
)
from tests.support.explaining import text_of
from tests.support.explaining_runs import A, B, C, asked, timed_round, usual_rounds


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
