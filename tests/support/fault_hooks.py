"""Hooks that derive the moments of a fault script from what a node does, and let the planned faults strike.

The calls to the worker and to the coordinator tell all moments but two: SENDING comes from the bytes of a
payload, and CHECKPOINT from :func:`checkpoint_faults`, because no call is made while files are written.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from node import hooks
from node.ipc import worker_calls as calls
from protocol.errors import ErrorCode, HetnodeError
from protocol.pb import hetnode_pb2 as pb
from protocol.spec.run import RunSpec
from protocol.types import PeerId
from tests.support.fault_script import Action, Moment, Script


class FaultHooks(hooks.Hooks):
    """The hooks of a node with a fault script."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self._spec: RunSpec
        self._round, self._step = 0, 0  # of the inner phase that has begun last
        self._own: dict[int, pb.PayloadDescriptor] = {}  # by stage: the newest that this node has announced
        self._decided = 0  # the last round whose decision the worker has applied
        self._microbatches = 0  # of the replica in one inner step
        self._forwards, self._backwards = 0, 0  # of this inner step so far

    async def before_worker_call(self, request: object) -> None:
        moment = self._moment_before(request)
        if moment is Moment.VALIDATE:
            await self.script.reach(moment, self._decided)
        elif moment is not None:
            await self.script.reach(moment, self._round, step=self._step)

    async def after_worker_call(self, request: object) -> None:
        match request:
            case calls.Build():
                self._spec = request.spec
            case calls.BeginRound():
                self._microbatches = len(request.samples) // self._spec.samples_per_round(1)
                await self._next_step(request.round_number, 0)
            case calls.Apply():
                await self._next_step(self._round, request.step + 1)
            case calls.Commit() | calls.Abort():
                await self._applied(request.round_number, request.stage)
            case calls.CommitEmbedding():
                await self._applied(request.round_number, 0)

    async def before_coordinator_call(self, method: str, request: Any) -> None:
        self._check_coordinator()
        if method == "Match":
            self._own[request.descriptor.stage] = request.descriptor
            await self.script.reach(Moment.PROPOSED, request.descriptor.round, request.descriptor.stage)
        elif method == "Report":
            fault = await self.script.reach(Moment.GATHERED, request.round, request.stage)
            if fault is not None and fault.action is Action.DENY:
                for field in ("held", "rejected", "group", "positions"):
                    request.ClearField(field)
                request.held.append(self._own[request.stage])

    async def after_coordinator_call(self, method: str, request: Any) -> None:
        self._check_coordinator()
        if method == "Match":
            await self.script.reach(Moment.MATCHED, request.descriptor.round, request.descriptor.stage)
        elif method in ("Report", "AwaitDecision"):
            await self.script.reach(Moment.DECIDED, request.round, request.stage)

    async def outgoing(
        self, round_number: int, stage: int, pieces: AsyncIterator[bytes]
    ) -> AsyncIterator[bytes]:
        first = await anext(pieces, b"")
        # Half of the first piece is sent before the fault strikes, however small the payload is.
        half = len(first) // 2
        if half:
            yield first[:half]
        fault = await self.script.reach(Moment.SENDING, round_number, stage)
        rest = first[half:]
        if fault is not None and fault.action is Action.DROP:
            return
        if fault is not None and fault.action is Action.CORRUPT:
            rest = bytes([rest[0] ^ 1]) + rest[1:]
        if rest:
            yield rest
        async for piece in pieces:
            yield piece

    def before_contact(self, peer: PeerId | str) -> None:
        if self.script.is_cut_off():
            raise HetnodeError(ErrorCode.NEIGHBOUR_UNREACHABLE, f"Peer {peer} is cut off.", "A test.")

    def time(self) -> float:
        return super().time() + self.script.skew()

    def _moment_before(self, request: object) -> Moment | None:
        """The moment of an inner step or validation that comes with this call."""
        match request:
            case calls.Forward():
                self._forwards += 1
                return Moment.FORWARD if self._backwards else Moment.WARM_UP
            case calls.Backward():
                self._backwards += 1
                return Moment.COOL_DOWN if self._forwards == self._microbatches else Moment.BACKWARD
            case calls.SquaredNorm():
                return Moment.NORM
            case calls.Apply():
                return Moment.APPLY
            case calls.Evaluate():
                return Moment.VALIDATE
            case _:
                return None

    async def _next_step(self, round_number: int, step: int) -> None:
        self._round, self._step, self._forwards, self._backwards = round_number, step, 0, 0
        await self.script.reach(Moment.INNER_STEP, round_number, step=step)
        await self.script.reach(Moment.PHASE, round_number, step=step)

    async def _applied(self, round_number: int, stage: int) -> None:
        self._decided = max(self._decided, round_number)
        await self.script.reach(Moment.APPLIED, round_number, stage)

    def _check_coordinator(self) -> None:
        if self.script.is_cut_off():
            raise HetnodeError(
                ErrorCode.COORDINATOR_UNREACHABLE, "The coordinator is cut off from this node.", "A test."
            )


@contextmanager
def checkpoint_faults() -> Iterator[None]:
    """Let faults at CHECKPOINT strike the nodes of this process.

    They strike when the anchors are in the hidden folder of the checkpoint and the private state is not yet.
    """
    from node.checkpoint import private_state  # noqa: PLC0415  imports torch, which most processes do not need

    write = private_state.write

    def write_or_fail(folder: Path, spec: RunSpec, round_number: int, stages: Any) -> None:
        found = hooks.current()
        if isinstance(found, FaultHooks):
            found.script.reach_now(Moment.CHECKPOINT, round_number)
        write(folder, spec, round_number, stages)

    with patch.object(private_state, "write", write_or_fail):
        yield
