"""The question whether this machine takes part in a run, once it has been said what the run does here."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from node.command_runner import Interrupted
from node.net.joining import RunOffer

log = logging.getLogger(__name__)


class Consent:
    """Shows an offer, and asks where a person can answer; ``--yes`` and services go on without an answer.

    Attributes:
        quiet: keeps other output away from the question.
    """

    def __init__(self, folder: Path, own_data: Sequence[str], is_given: bool) -> None:
        self._folder, self._own_data, self._is_given = folder, own_data, is_given
        self.quiet: Callable[[], AbstractContextManager[None]] = nullcontext

    async def ask(self, offer: RunOffer) -> None:
        """Raises Interrupted if the answer is no."""
        from node.views.offer import offer_lines  # noqa: PLC0415  only the first start of a run needs it

        for line in offer_lines(offer, self._folder, self._own_data):
            log.info("%s", line)
        if self._is_given or not can_answer():
            return
        with self.quiet():
            sys.stderr.write("Take part? [y/N] ")
            sys.stderr.flush()
            answer = await _line()
        if answer.strip().lower() not in ("y", "yes"):
            log.info("this machine takes no part: nothing was trained, and it will ask again")
            raise Interrupted


def can_answer() -> bool:
    """Whether a person sees the question, and what is typed arrives here."""
    try:
        # A process in the background would be stopped by its first read.
        return sys.stderr.isatty() and os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError, AttributeError):
        return False


async def _line() -> str:
    """The next line of standard input; a thread could not be interrupted."""
    loop, typed, source = asyncio.get_running_loop(), asyncio.Event(), sys.stdin.fileno()
    loop.add_reader(source, typed.set)
    try:
        await typed.wait()
        return os.read(source, 1024).decode(errors="replace")
    finally:
        loop.remove_reader(source)
