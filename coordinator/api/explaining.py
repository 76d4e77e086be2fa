"""Answers to questions about the run while it goes on. A leaf gives them: coordinator.ops.explain."""

from __future__ import annotations

from coordinator.run.command_loop import CommandLoop
from coordinator.store.history import SqliteHistory
from coordinator.store.store import Store
from protocol.errors import ErrorCode, HetnodeError
from protocol.status import Explanation


class NoExplainer:
    """Stands in for explanations where they are no part of the program. Arguments as those of the leaf."""

    def __init__(self, command_loop: CommandLoop, store: Store, history: SqliteHistory) -> None:
        pass

    async def explain(self, caller: str, question: str) -> Explanation:
        raise HetnodeError(
            ErrorCode.BAD_OPTION, "This coordinator explains nothing.", "Ask for the status of the run."
        )
