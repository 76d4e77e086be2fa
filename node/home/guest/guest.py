"""Whether a node may take part now, or has to rest: for its owner's command, or for a rule of its machine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Protocol

from protocol.errors import ErrorCode, HetnodeError

BY_HAND = "it was paused by hand; 'hetnode resume' lets it take part again"
PATIENCE_SECONDS = 120.0
_LOOK_SECONDS = 5.0
_MARK = "paused"


@dataclass(frozen=True)
class Rest:
    """Why a node must not take part now, as the end of a sentence, such as "it is outside its hours".

    `patience`: seconds that the node may take to finish the round in which it trains.
    """

    reason: str
    patience: float = PATIENCE_SECONDS


class GuestRule(Protocol):
    """Says now and then whether the node has to rest."""

    def rest(self) -> Rest | None:
        """Why it has to rest now; None if this rule lets it take part. May take a second; must not raise."""


class Guest:
    """What the node of one folder is allowed to do now. It is paused by hand, by `rules`, or by both.

    A pause by hand is noted in `folder`, so that it outlives the process.

    Args:
        patience: seconds that the node may take for the end of its round when it is paused by hand.

    Attributes:
        rest: why the node has to rest; None while it may take part.
        is_here: the node takes part in its run, or is about to; set by :mod:`node.home.guest.visits`.
    """

    def __init__(
        self, folder: Path, rules: tuple[GuestRule, ...] = (), patience: float = PATIENCE_SECONDS
    ) -> None:
        self._mark, self._rules, self._patience = folder / _MARK, rules, patience
        self._changed = asyncio.Event()  # set and then replaced when `rest` changes
        self._is_paused = self._mark.exists()
        self.rest: Rest | None = None
        self.is_here = False
        self._ruled = self._ask_rules()
        self._update()

    def pause(self, patience: float | None = None) -> None:
        """Rest until :meth:`resume`. Raises HetnodeError DISK_FULL if that cannot be noted in the folder."""
        with _noted(self._mark):
            self._mark.touch()
        self._is_paused = True
        if patience is not None:
            self._patience = patience
        self._update()

    def resume(self) -> None:
        """End the pause by hand; the rules still count. Raises as :meth:`pause`."""
        with _noted(self._mark):
            self._mark.unlink(missing_ok=True)
        self._is_paused = False
        self._update()

    def _ask_rules(self) -> Rest | None:
        return next((rest for rule in self._rules if (rest := rule.rest()) is not None), None)

    def _update(self) -> None:
        own = Rest(BY_HAND, self._patience) if self._is_paused else None
        found = own or self._ruled
        if found == self.rest:
            return
        self.rest = found
        self._changed.set()
        self._changed = asyncio.Event()

    async def keep_looking(self) -> NoReturn:
        """Ask the rules again and again."""
        # Short and regular: a suspended machine, or a clock that was put right, makes a long sleep wrong.
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            if self._rules:
                self._ruled = await asyncio.to_thread(self._ask_rules)
                self._update()

    async def until(self, ready: Callable[[Rest | None], bool]) -> None:
        """Wait until `ready` holds for `rest`."""
        while not ready(self.rest):
            await self._changed.wait()


@contextmanager
def _noted(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise HetnodeError(
            ErrorCode.DISK_FULL,
            f"{file} cannot be written: {error.strerror or error}.",
            "Make room on that disk, or make the folder writable.",
        ) from None
