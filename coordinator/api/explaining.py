"""Answers to questions about the run while it goes on. A leaf gives them: coordinator.ops.explain."""

from __future__ import annotations

from protocol.errors import ErrorCode, HetnodeError
from protocol.status import Explanation


class NoExplainer:
    """Stands in for explanations where they are no part of the program. It takes whatever the leaf takes."""

    def __init__(self, *_: object) -> None:
        pass

    async def explain(self, caller: str, question: str) -> Explanation:
        raise HetnodeError(
            ErrorCode.BAD_OPTION, "This coordinator explains nothing.", "Ask for the status of the run."
        )
