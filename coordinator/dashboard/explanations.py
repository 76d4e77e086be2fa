"""Answers why something in the run is as it is, as ``hetnode explain`` does, for threads of the dashboard."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping

from coordinator.api.explaining import Explainer
from coordinator.command_loop import CommandLoop
from coordinator.dashboard.queries import Record, shown
from coordinator.explain.facts import MOST_CHARACTERS
from protocol.errors import ErrorCode, HetnodeError
from protocol.status import Explanation

KEPT_SECONDS = 10.0
"""How long an answer serves all readers: the coordinator answers few questions at a time."""
_WAIT_SECONDS = 30.0
_MOST_QUESTION = 128
_CALLER = "the dashboard"
"""All readers together, with the same bounds as one peer."""


_END_OF_PEER = re.compile(r"\.\.([1-9A-HJ-NP-Za-km-z]{8})\b")


class Explanations:
    """Asks the explainer of the run, which keeps its index on the coordinator's event loop.

    Args:
        loop: that of the coordinator.
    """

    def __init__(
        self, explainer: Explainer, command_loop: CommandLoop, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._explainer, self._command_loop, self._loop = explainer, command_loop, loop

    def explain(self, options: Mapping[str, str]) -> Record:
        """The answer to `question`: "now", the number of a round, or a peer. Waits; not for an event loop.

        Raises HetnodeError: as :meth:`Explainer.explain`; RATE_LIMITED if the coordinator has no time for it.
        """
        question = options.get("question", "now")[:_MOST_QUESTION]
        asked = asyncio.run_coroutine_threadsafe(self._explainer.explain(_CALLER, question), self._loop)
        try:
            found = asked.result(_WAIT_SECONDS)
        except TimeoutError:
            asked.cancel()
            raise HetnodeError(
                ErrorCode.RATE_LIMITED, "The coordinator has no time for an explanation.", "Try again."
            ) from None
        return {
            "title": shown(found.title, MOST_CHARACTERS),
            "sentences": [
                {"text": shown(each.text, MOST_CHARACTERS + 1), "events": list(each.events)}
                for each in found.sentences
            ],
            "peers": self._peers(found),
        }

    def _peers(self, found: Explanation) -> dict[str, str]:
        """The peers that the answer names, by the ends of their ids."""
        texts = (found.title, *(each.text for each in found.sentences))
        named = {end for text in texts for end in _END_OF_PEER.findall(text)}
        ends: dict[str, list[str]] = {}
        for peer in self._command_loop.state.peers:
            if peer[-8:] in named:
                ends.setdefault(peer[-8:], []).append(peer)
        return {end: peers[0] for end, peers in ends.items() if len(peers) == 1}
