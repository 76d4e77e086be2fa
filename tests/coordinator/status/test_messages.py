"""What the run says that it does or waits for."""

from __future__ import annotations

from coordinator.state.commands import Offer
from coordinator.status.causes import run_cause
from coordinator.status.messages import run_message
from protocol.status import CauseCode
from protocol.types import Role
from tests.builders import keyed, spec_of
from tests.support.coordinator_run import Run

A, B, C, D = (keyed(i) for i in range(4))


class TestSentences:
    def test_the_message_of_each_phase_names_the_reason_to_wait(self) -> None:
        spec = spec_of(2, 1, 1)
        run = Run(spec)
        run.accept(A.join(spec, Role.STAGE))
        assert run_message(run.state) == (
            "waiting for 1 more stage peer (1 of 2 here) and 1 more full replica (0 of 1 here)"
        )
        run.accept(B.join(spec, Role.STAGE))
        run.accept(C.join(spec, Role.REPLICA))
        assert run_message(run.state) == "training: round 1 of 3"
        run.accept(Offer(C.peer, C.payload(spec, 0, 1)))
        assert run_message(run.state) == "training: round 1 of 3, waiting for replica-1 at stage 0"
        run.accept(Offer(A.peer, A.payload(spec, 0, 1)))
        assert run_cause(run.state).code is CauseCode.REPORTS_LACKING
