"""When each peer of a log gave its last sign of life: heartbeats are not stored, losses are."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import replace
from math import inf

from coordinator.run.state import events
from coordinator.run.state.events import Event
from coordinator.run.state.records import LastSeen
from coordinator.run.state.state import State
from protocol.types import Part, PeerId


class Heartbeats:
    """The heartbeats that a log implies: a peer is heard until its loss says since when it was silent.

    Peers say that they keep the anchors that rollbacks of the log restore, or hold those that are adopted.
    """

    def __init__(self, log: Sequence[Event]) -> None:
        # For each peer and each of its stays, in order: when it was last heard.
        self._until: dict[PeerId, deque[float]] = defaultdict(deque)
        rollbacks = [each for each in log if isinstance(each, events.RunRolledBack)]
        self._kept = tuple(each.restore_round for each in rollbacks)
        self._ahead = {
            (anchor.stage, each.restore_round, Part(anchor.part)): anchor.digest
            for each in rollbacks
            for anchor in each.digests
        } | {(0, each.round_number - 1, Part.COPY): "" for each in rollbacks}
        for event in log:
            if isinstance(event, events.PeerLost):
                self._until[event.peer].append(event.at - event.silent_seconds)
            elif isinstance(event, events.PeerLeft | events.PeerQuarantined):
                self._until[event.peer].append(inf)

    def note(self, event: Event) -> None:
        """`event` is applied: a stay of its peer may be over."""
        if isinstance(event, events.PeerLost | events.PeerLeft | events.PeerQuarantined):
            self._until[event.peer].popleft()

    def heard(self, state: State, now: float) -> State:
        """`state` with the signs of life up to `now` of all peers that are live."""
        last_seen, told = state.last_seen, ((), self._kept, self._ahead)
        for peer, known in state.peers.items():
            until = self._until.get(peer)
            at = min(now, until[0] if until else inf)
            if known.is_live and at > last_seen[peer].at:
                last_seen = last_seen.set(peer, LastSeen(at, state.current_round, 0, True, *told))
        return replace(state, last_seen=last_seen)
