"""What a run waits for and what would make it faster, also while it is paused."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.run.state import events
from coordinator.run.state.commands import (
    Leave,
    Offer,
    PauseRun,
    ResumeRun,
    Start,
    Tick,
)
from protocol.types import PausedBy
from tests.builders import spec_of
from tests.support.coordinator_run import (
    Run,
    join,
    measure,
    play_rounds,
    started,
    started_and_attested,
)
from tests.support.explaining import text_of
from tests.support.explaining_runs import A, B, C, D, asked, timed_round, usual_rounds


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
