"""The process that follows ``metrics.jsonl`` and sends its figures: ``python -m ... TOOL FOLDER RUN``.

It ends when its standard input does, after it has sent what there is. What fails is tried again later from
the last place that was kept, so a figure may be sent twice, and none is lost.
"""

from __future__ import annotations

import logging
import os
import select
import sys
from contextlib import closing, suppress
from pathlib import Path

from coordinator.ops.tracking.figures import figures_of
from coordinator.ops.tracking.tools import Sink, Tool, opened
from protocol.trust.private_file import write_whole

log = logging.getLogger(__name__)

POLL_SECONDS, RETRY_SECONDS = 2.0, 60.0
_MOST_LINES = 5000
"""Between two flushes."""


def main() -> None:
    """Follow until the end of standard input."""
    tool, folder, run = Tool(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    with suppress(OSError):
        os.nice(10)
    place, told, is_over = folder / f"tracked-{tool}", "", False
    while not is_over:
        try:
            with closing(opened(tool, folder, run)) as sink:
                while not is_over:
                    is_over = _is_over(POLL_SECONDS)
                    while _send_some(folder / "metrics.jsonl", place, sink):
                        pass
        except Exception as error:  # whatever the library raises: the run goes on without it
            if told != (told := str(error)):
                log.warning("%s does not take the figures of the run: %s", tool, told[:500])
            is_over = is_over or _is_over(RETRY_SECONDS)


def _is_over(seconds: float) -> bool:
    """Whether standard input ends within that time: nothing is ever written to it."""
    return bool(select.select([sys.stdin], [], [], seconds)[0])


def _send_some(metrics: Path, place: Path, sink: Sink) -> bool:
    """Send the next lines of `metrics`, if there are any, and note in the file `place` how far that is."""
    begin = int(place.read_text()) if place.exists() else 0
    if not metrics.exists() or metrics.stat().st_size <= begin:
        return False
    end = begin
    with metrics.open("rb") as file:
        file.seek(begin)
        for _ in range(_MOST_LINES):
            if not (line := file.readline()).endswith(b"\n"):
                break
            end += len(line)
            if (figures := figures_of(line)) is not None:
                sink.send(figures)
    sink.flush()
    write_whole(place, str(end))
    return end > begin


if __name__ == "__main__":
    main()
