"""The coordinator's time, as this node estimates it: DHT records and certificates are checked against it.

hivemind refuses peers whose clocks differ from its own by more than 3 seconds, and the clock of a home
computer may be minutes off. So hivemind's clock, a function that its modules import by name, is replaced.
"""

from __future__ import annotations

import sys
import time

from node import hooks


def coordinator_time(offset: float) -> float:
    """Unix time of the coordinator, whose clock is `offset` seconds ahead of this machine's."""
    return hooks.current().time() + offset


def correct_dht_time(offset: float) -> None:
    """Replace hivemind's clock in this process and those forked from it, in all modules that import it.

    To be called when everything is imported and nothing started.
    """

    def get_dht_time() -> float:
        return coordinator_time(offset)

    for module in list(sys.modules.values()):
        if getattr(module, "get_dht_time", None) is time.time:
            module.get_dht_time = get_dht_time  # type: ignore[attr-defined]
