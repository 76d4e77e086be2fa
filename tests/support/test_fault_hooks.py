"""The moments of an inner step, derived from the calls to the worker."""

from __future__ import annotations

import asyncio

import pytest

from node.ipc import worker_calls as calls
from protocol.math.microbatch_order import OpKind, one_forward_one_backward
from protocol.run_files.resolve import resolve
from protocol.types import StageRange
from tests.support.fault_hooks import FaultHooks
from tests.support.fault_script import Moment, Script

MICROBATCHES = 8
OF_A_STEP = ["inner-step", "phase", "warm-up", "backward", "forward", "cool-down", "norm", "apply"]


class RecordingScript(Script):
    """A script without faults that records the moments."""

    def __init__(self) -> None:
        self.reached: list[tuple[Moment, int, int | None]] = []

    async def reach(
        self, moment: Moment, round_number: int, stage: int | None = None, step: int | None = None
    ) -> None:
        self.reached.append((moment, round_number, step))


@pytest.mark.parametrize(("position", "members"), [(0, 2), (1, 2), (0, 3), (1, 3), (2, 3)])
def test_a_step_has_all_moments_of_its_schedule_in_their_order(position: int, members: int) -> None:
    spec = resolve("nano")
    script = RecordingScript()
    hooks = FaultHooks(script)

    async def call(request: object) -> None:
        await hooks.before_worker_call(request)
        await hooks.after_worker_call(request)

    async def step() -> None:
        await call(calls.Build(spec, StageRange(0, 1)))
        await call(calls.BeginRound(2, range(spec.samples_per_round(MICROBATCHES))))
        for operation in one_forward_one_backward(position, members, MICROBATCHES):
            if operation.kind is OpKind.FORWARD:
                await call(calls.Forward(0, operation.microbatch, None))
            else:
                await call(calls.Backward(operation.microbatch, None))
        await call(calls.SquaredNorm())
        await call(calls.Apply(0, 1.0))

    asyncio.run(step())
    found = [moment for moment, *_ in script.reached]
    assert list(dict.fromkeys(found)) == OF_A_STEP
    assert {(round_number, step) for _, round_number, step in script.reached[:-2]} == {(2, 0)}
    assert script.reached[-1] == (Moment.PHASE, 2, 1)
    warm_ups = found.count(Moment.WARM_UP)
    assert warm_ups == found.count(Moment.COOL_DOWN)
    assert found.count(Moment.WARM_UP) + found.count(Moment.FORWARD) == MICROBATCHES
