"""Answers questions about the run while it goes on, in a thread, one at a time.

The command loop goes on meanwhile: an answer is made from the state as it was and the history, and reads
its events between appends (:meth:`coordinator.store.store.Store.read`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from coordinator.ops.explain.explain import explain
from coordinator.run.command_loop import CommandLoop
from coordinator.store.history import SqliteHistory
from coordinator.store.store import Store
from protocol.server.calls import rate_limited
from protocol.server.limits import FairShare
from protocol.status import Explanation
from protocol.trust.rate_limit import RateLimit
from protocol.types import PeerId

_QUESTIONS_OF_ONE, _QUESTIONS = 2, 16
"""Questions that wait for their turn, of one caller and of all."""
_AT_ONCE, _PER_SECOND = 20, 0.5
"""Questions of one caller."""


class Explainer:
    """Answers questions about one run.

    Args:
        store: of the events of `command_loop`.
        history: of the same events.
        resting: the peers whose processes rest, as they are at each moment.
    """

    def __init__(
        self, command_loop: CommandLoop, store: Store, history: SqliteHistory, resting: Mapping[PeerId, int]
    ) -> None:
        self._command_loop, self._store, self._history = command_loop, store, history
        self._resting = resting
        self._turn = asyncio.Lock()
        self._places = FairShare(_QUESTIONS_OF_ONE, _QUESTIONS)
        self._rate = RateLimit(_AT_ONCE, _PER_SECOND)

    async def explain(self, caller: str, question: str) -> Explanation:
        """The answer to a question (:func:`coordinator.ops.explain.questions.question_of`).

        Raises:
            HetnodeError: RATE_LIMITED if `caller`, or all together, ask too much; BAD_OPTION; STORE_CORRUPT;
                NO_HISTORY.
        """
        if not self._rate.allows(caller, self._command_loop.now()):
            raise rate_limited(f"{caller[:96]} asks too often for explanations")
        if not self._places.take(caller):
            raise rate_limited("Too many questions wait for an explanation")
        # A caller that goes away does not end its thread, so its place and its turn last as long.
        return await asyncio.shield(asyncio.ensure_future(self._in_turn(caller, question)))

    async def _in_turn(self, caller: str, question: str) -> Explanation:
        try:
            async with self._turn:
                loop, resting = self._command_loop, frozenset(self._resting)
                return await asyncio.to_thread(
                    explain, question, loop.state, self._history, self._store.read, loop.now(), resting
                )
        finally:
            self._places.release(caller)
