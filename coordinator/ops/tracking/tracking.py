"""Starts and ends the process that sends the figures of a run to a tool."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

from coordinator.ops.tracking.tools import Tool

log = logging.getLogger(__name__)

END_SECONDS = 15.0
"""How long the process may take to send the last figures."""


class Tracking:
    """Sends what ``metrics.jsonl`` in `folder` gets to `tool`, from :meth:`start` to the end of the block."""

    def __init__(self, folder: Path, tool: Tool | None) -> None:
        self._folder, self._tool = folder, tool
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Tracking:
        return self

    def start(self, run: str) -> None:
        """Begin, where there is a tool, for the run with this id. Never raises: the run goes on without."""
        if self._tool is None or self._process is not None:
            return
        module = f"{__package__}.follower"
        command = [sys.executable, "-P", "-m", module, self._tool.value, str(self._folder.absolute()), run]
        try:
            # A session of its own: Ctrl-C is for the coordinator, whose end it waits for.
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
            )
        except OSError as error:
            log.warning("the figures of the run are not sent to %s: %s", self._tool, error)

    def __exit__(self, *_: object) -> None:
        if (process := self._process) is None or process.stdin is None:
            return
        process.stdin.close()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            log.warning("%s takes long: its last figures are sent at the next start", self._tool)
            process.kill()
            process.wait()
