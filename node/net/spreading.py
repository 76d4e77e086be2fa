"""Spreads calls that all members of a swarm would make in the same moment."""

from __future__ import annotations

import random

PEERS_PER_SECOND = 100.0
"""Of a swarm; each of them makes a few calls."""


def random_pause(peers: int) -> float:
    """Seconds to wait before a call that each of `peers` makes when a round ends."""
    return random.uniform(0, peers / PEERS_PER_SECOND)
