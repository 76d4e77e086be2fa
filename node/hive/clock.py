"""The time by which DHT records and certificates are believed: the coordinator's, as well as it is known.

hivemind refuses peers whose clocks differ from its own by more than 3 seconds, and a home computer may be
minutes off. So its clock, a function that its modules import by name, is replaced by a corrected one.
"""

from __future__ import annotations

import sys
import time

from node import hooks


def coordinator_time(offset: float) -> float:
    """Unix time of the coordinator, whose clock is `offset` seconds ahead of this machine's."""
    return hooks.current().time() + offset


def correct_dht_time(offset: float) -> None:
    """Let hivemind, and all who have imported its clock, go by the coordinator's in this process.

    And in those forked from it. To be called when everything is imported and nothing started.
    """

    def get_dht_time() -> float:
        return coordinator_time(offset)

    for module in list(sys.modules.values()):
        if getattr(module, "get_dht_time", None) is time.time:
            module.get_dht_time = get_dht_time  # type: ignore[attr-defined]
