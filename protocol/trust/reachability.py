"""Where a peer says that others reach it, and what answered when the coordinator dialled it there."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.types import Reachability

DIAL_BACK_SECONDS = 3.0
"""How long the coordinator tries the addresses of one peer before it answers a call."""


@dataclass(frozen=True)
class Addresses:
    """Claims of a peer: ``host:port`` for links and of its DHT peer, each "" where it only dials.

    `relayed` says that both belong to a relay.
    """

    endpoint: str = ""
    dht: str = ""
    relayed: bool = False


@dataclass(frozen=True)
class Reached:
    """Which of the claimed addresses answered as that peer, and `reason`, a sentence for people, or "".

    `endpoint_problem` and `dht_problem` say why a claimed address did not; they may be the end of a sentence.
    """

    reachability: Reachability
    endpoint: bool = False
    dht: bool = False
    reason: str = ""
    endpoint_problem: str = ""
    dht_problem: str = ""


NOT_REACHED = Reached(Reachability.DIAL_ONLY)
"""Of a peer that claims no address."""
