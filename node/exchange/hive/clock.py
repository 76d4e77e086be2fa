"""This node's estimate of the coordinator's time, against which DHT records and certificates are checked.

hivemind refuses peers whose clocks differ from its own by more than 3 seconds, and the clock of a home
computer may be wrong by minutes. So this module replaces hivemind's clock, a function that hivemind's modules
import by name.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from node import hooks
from protocol.server.clock import steady_from


def coordinator_clock(offset: float) -> Callable[[], float]:
    """Unix time of the coordinator, whose clock is `offset` seconds ahead of this machine's at present."""
    return steady_from(hooks.current().time() + offset)


def correct_dht_time(offset: float) -> None:
    """Replace hivemind's clock in this process and in those that it forks.

    Call it after all imports and before anything is started.
    """
    get_dht_time = coordinator_clock(offset)
    # hivemind's get_dht_time is time.time itself, so this finds every module that imported it.
    for module in list(sys.modules.values()):
        if getattr(module, "get_dht_time", None) is time.time:
            module.get_dht_time = get_dht_time  # type: ignore[attr-defined]
