"""Work with the newest model of a run while it trains: beside its nodes, in a process of its own."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from node.folder import run_in
from node.here import known_runs
from node.security import credentials
from node.security.credentials import Credentials
from protocol.errors import ErrorCode, HetnodeError
from protocol.status import RunPhase

log = logging.getLogger(__name__)

POLL_SECONDS = 2.0
FAILURES = (HetnodeError, OSError, RuntimeError)
"""Of work with a model, after which a follower goes on; torch raises RuntimeError, also without memory."""
_LOOKS_PER_STATUS = 5
_LAST_SECONDS = 60.0
"""How long a node may take to write the last model once the run is finished."""
_LAST_ATTEMPTS, _RETRY_SECONDS = 5, 60.0
"""After the last model there is no other that could be the next attempt."""
_NICE = 19
"""The lowest priority: a node beside this process computes first."""


@dataclass(frozen=True)
class FollowedRun:
    """A run whose models are below `place`; `connect` tells where and with what to ask its coordinator."""

    place: Path
    connect: Callable[[], tuple[str, Credentials]]

    def last_round(self) -> int | None:
        """The last round of a run that is finished. Raises HetnodeError as fetch_status.

        A coordinator that does not answer has ended if the model of the last round is here.
        """
        from node.net.coordinator_channel import fetch_status  # noqa: PLC0415

        try:
            status = asyncio.run(fetch_status(*self.connect()))
        except HetnodeError as error:
            if error.code is ErrorCode.COORDINATOR_UNREACHABLE and (last := self._newest_if_last()):
                return last
            raise
        return status.spec.rounds if status.phase is RunPhase.FINISHED else None

    def _newest_if_last(self) -> int | None:
        from node.checkpoint import global_model  # noqa: PLC0415

        with suppress(HetnodeError):
            if found := global_model.find_whole(self.place, 0):
                return found[0] if found[0] >= global_model.verify(found[1][0]).spec.rounds else None
        return None


def run_at(place: Path) -> FollowedRun:
    """The run of the node or swarm at `place`, with the certificate of that node, or of the operator.

    Raises HetnodeError NO_CREDENTIALS.
    """
    from node.here.nodes import nodes_here  # noqa: PLC0415

    here = (node for node in nodes_here() if node.folder == place.absolute())
    own = (node.credentials for node in here if run_in(place) == node.run)
    if (folder := next(own, None)) is None:
        known_runs.operator_or_member(str(place))
        return FollowedRun(place, lambda: known_runs.operator_or_member(str(place)))

    def of_member() -> tuple[str, Credentials]:
        known = credentials.load(folder)  # the node renews them, and notes where the coordinator has moved
        return known.api, known.tls

    return FollowedRun(place, of_member)


def follow(run: FollowedRun, every: int, work: Callable[[int, Sequence[Path]], None]) -> None:
    """Give each `every`-th round's whole model, or the next newer one there is, to `work`, then the last one.

    `work` gets the round and the checkpoints with its stages. What fails of it is logged; its next chance
    is the next model, and of the last one it has several. Returns when the run is over: the coordinator says
    so, or the last model is known.
    """
    from node.checkpoint import global_model  # noqa: PLC0415

    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.default_int_handler)  # so that temporary folders are removed
    os.nice(_NICE)
    clock, done, looks, silence = time.monotonic, -1, 0, ""
    last, until = None, math.inf
    while True:
        if last is None and looks % _LOOKS_PER_STATUS == 0:
            try:
                last, silence = run.last_round(), ""
                until = math.inf if last is None else clock() + _LAST_SECONDS
            except HetnodeError as error:
                if silence != (silence := error.cause):
                    log.warning("%s", error)
        looks += 1
        found = global_model.find_whole(run.place, done)
        if found is None and done < 0 and looks == 1:
            log.info("there is no whole model in %s yet: full replicas and whole swarms have one", run.place)
        is_last = last is not None and ((found[0] if found else done) >= last or clock() > until)
        if found is not None and (is_last or found[0] // every > max(0, done) // every):
            done, looks = found[0], 0
            _attempt(work, *found, _LAST_ATTEMPTS if is_last else 1)
            sys.stdout.flush()  # who reads a file or pipe does not wait for the end of the run
        elif is_last:
            return
        else:
            time.sleep(POLL_SECONDS)


def _attempt(
    work: Callable[[int, Sequence[Path]], None], number: int, parts: Sequence[Path], attempts: int
) -> None:
    for left in reversed(range(attempts)):
        try:
            work(number, parts)
            return
        except FAILURES as error:
            log.warning("round %d: %s", number, error)
        if left:
            time.sleep(_RETRY_SECONDS)
