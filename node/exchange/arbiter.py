"""The arbiter finds out whether contested payloads exist and are valid, and keeps those for other peers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from node.checkpoint.download import WrongBytes
from node.checkpoint.transfer import CheckpointServer
from node.core.model.shapes import payload_layout
from node.exchange.payload_calls import PayloadCalls
from node.exchange.payload_store import PayloadStore
from node.exchange.transfer import NotHeld
from protocol.codec.payload import decode
from protocol.errors import HetnodeError
from protocol.math.payload_layout import PayloadLayout
from protocol.spec.run import RunSpec
from protocol.types import Finding, PayloadDescriptor, PeerId, Verdict

log = logging.getLogger(__name__)

KEEP_ROUNDS = 3
"""A payload is served until the round after the next one is decided."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 1.0  # seconds between two attempts with all donors


@dataclass(frozen=True)
class StagePayloads:
    """The payloads of one stage: their form, where they are kept, and how they are fetched."""

    layout: PayloadLayout
    store: PayloadStore
    calls: PayloadCalls


CallsOf = Callable[[int, int, PayloadStore, CheckpointServer], Awaitable[PayloadCalls]]
"""Given a stage, the length of its payloads, and what is served: the calls of a service that answers now."""


class PayloadArbiter:
    """Belongs to one event loop. Keeps only payloads that have the length and form of their stage."""

    def __init__(self, stages: Mapping[int, StagePayloads]) -> None:
        self._stages = stages

    @classmethod
    async def of_run(cls, spec: RunSpec, folder: Path, calls_of: CallsOf) -> PayloadArbiter:
        """An arbiter for all stages, which keeps payloads in `folder`, also over a restart."""
        stages = {}
        for stage in range(spec.swarm.stages):
            store = PayloadStore(folder / f"stage-{stage:02d}", KEEP_ROUNDS)
            no_checkpoints = CheckpointServer(folder / "checkpoints")  # the folder stays empty
            layout = payload_layout(spec, stage)
            calls = await calls_of(stage, layout.nbytes, store, no_checkpoints)
            stages[stage] = StagePayloads(layout, store, calls)
        return cls(stages)

    async def arbitrate(
        self, descriptor: PayloadDescriptor, donors: Sequence[PeerId], seconds: float
    ) -> Verdict:
        """Fetch the payload from any of `donors` within `seconds`, and decode it.

        The caller has verified the signature of the descriptor, so a payload with the announced hash that
        cannot be decoded is the fault of its owner.
        """
        stage = self._stages[descriptor.stage]
        if reason := _problem_of(descriptor, stage.layout):
            return Verdict(Finding.INVALID, reason)
        refuted: dict[PeerId, str] = {}
        payload = await asyncio.to_thread(stage.store.get, descriptor.round_number, descriptor.sha256)
        try:
            async with asyncio.timeout(seconds):
                if payload is None:
                    payload = await _fetch(stage.calls, descriptor, donors, refuted)
        except TimeoutError:
            pass
        if payload is None:
            return Verdict(Finding.NOT_FOUND, f"none of {len(donors)} peers sent it", tuple(refuted))
        try:
            await asyncio.to_thread(decode, stage.layout, payload)
        except HetnodeError as error:
            return Verdict(Finding.INVALID, error.cause, tuple(refuted))
        await asyncio.to_thread(stage.store.put, descriptor.round_number, descriptor.sha256, payload)
        return Verdict(Finding.HELD, refuted=tuple(refuted))

    def forget(self, before_round: int) -> None:
        """Drop the payloads of the rounds before `before_round`. Blocks on the disk."""
        for stage in self._stages.values():
            stage.store.forget(before_round)


def _problem_of(descriptor: PayloadDescriptor, layout: PayloadLayout) -> str:
    """Why no payload with this descriptor can be valid; "" if one can."""
    if descriptor.nbytes != layout.nbytes:
        return f"it has {descriptor.nbytes} bytes, every payload of this stage has {layout.nbytes}"
    if descriptor.codec != layout.codec:
        return f"its codec is {descriptor.codec} instead of {layout.codec}"
    return ""


async def _fetch(
    calls: PayloadCalls, descriptor: PayloadDescriptor, donors: Sequence[PeerId], refuted: dict[PeerId, str]
) -> bytes | None:
    """Ask one donor after the other until one has sent the payload; None if no donor is left to ask.

    `refuted` receives the donors whose own answer shows that they do not hold it; they are not asked again.
    """
    pause = _FIRST_PAUSE
    while left := [donor for donor in donors if donor not in refuted]:
        for donor in left:
            try:
                return await calls.fetch(donor, descriptor, lambda: None)
            except (WrongBytes, NotHeld) as error:
                refuted[donor] = str(error)
            except Exception as error:  # a transport's library raises anything here
                log.debug("no contested payload from %s: %r", donor, error)
        await asyncio.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    return None
