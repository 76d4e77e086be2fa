"""The process of a server of many callers: its threads, its collections of objects, its memory."""

from __future__ import annotations

import ctypes
import gc
import platform
import sys

_SWITCH_SECONDS = 0.0005
"""The thread that decides commands gives way to the event loop after so long. With Python's 5 ms the loop
would wait as long after each of its system calls, and an answer takes several."""
_COLLECTIONS = (20_000, 5, 20)
"""A collection of all objects takes 0.3 s with 1,000 peers. A call leaves half a kilobyte in cycles, so one
in two minutes is enough."""
_M_ARENA_MAX = -8  # of mallopt(3)


def prepare_process() -> None:
    """Set this process up to answer many calls while commands are decided, and to keep its memory small."""
    sys.setswitchinterval(_SWITCH_SECONDS)
    gc.set_threshold(*_COLLECTIONS)
    if platform.libc_ver()[0] == "glibc":
        # By default threads have heaps of their own, and what one has freed is of no use to the others: with
        # 1,000 peers that grew by 7 MB a round. Here the interpreter lets one thread work at a time anyway.
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
