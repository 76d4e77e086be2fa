"""The sources from which members call: the DHT peers of the run accept connections of these alone."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence

from protocol.group.peers import MemberSource
from protocol.trust.rate_limit import RateLimit
from protocol.types import PeerId

SOURCES_OF_PEER = 4
"""The newest count: a machine moves between networks, and may use IPv4 and IPv6."""
MOST_PEERS = 10_000
# A member that changes its source all the time would make the coordinator tell that to all others.
_AT_ONCE, _PER_SECOND = SOURCES_OF_PEER, 1 / 600
_SLACK = 1000

Position = tuple[int, int]
"""How much of the sources someone knows. Later positions are larger."""
NOTHING: Position = (-1, 0)


class MemberSources:
    """The newest sources of each peer that has called with its certificate. Kept in memory alone.

    Attributes:
        admitted: the position up to which the coordinator's own DHT peer accepts connections.
        told: the position of which watchers are told.
    """

    def __init__(self) -> None:
        self._of: OrderedDict[PeerId, list[str]] = OrderedDict()  # the peer that called last is the last
        self._limit = RateLimit(_AT_ONCE, _PER_SECOND, keys=MOST_PEERS)
        self._log: list[MemberSource] = []  # in the order in which they were noted
        self._rewritten = 0  # how often the log began anew
        self.admitted = self.told = self.position  # nothing that a DHT peer had to accept yet

    @property
    def position(self) -> Position:
        return self._rewritten, len(self._log)

    @property
    def peers(self) -> frozenset[PeerId]:
        """Those that have called with their certificates, also excluded ones."""
        return frozenset(self._of)

    def note(self, peer: PeerId, source: str, now: float) -> bool:
        """Note that `peer` has called from `source`. Returns whether that is new.

        A peer that changes its source too often keeps the ones it had.
        """
        if peer in self._of:
            self._of.move_to_end(peer)
        sources = self._of.get(peer, [])
        if source in sources or not self._limit.allows(peer, now):
            return False
        self._of[peer] = [*sources, source][-SOURCES_OF_PEER:]
        if len(self._of) > MOST_PEERS:
            self._of.popitem(last=False)
        self._log.append(MemberSource(peer, source))
        if len(self._log) > _SLACK + 2 * SOURCES_OF_PEER * len(self._of):
            self._log = [MemberSource(each, one) for each, ones in self._of.items() for one in ones]
            self._rewritten += 1
        return True

    def without(self, excluded: Collection[PeerId]) -> frozenset[str]:
        """The sources of all peers but the excluded ones."""
        return frozenset(one for peer, ones in self._of.items() if peer not in excluded for one in ones)

    def since(self, position: Position) -> Sequence[MemberSource]:
        """What was noted after `position`, and perhaps some from before."""
        rewritten, count = position
        return self._log[count if rewritten == self._rewritten else 0 :]
