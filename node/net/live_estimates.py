"""What this node knows of its own speed and of its links, renewed by what it does anyway.

The numbers are told to the coordinator with a heartbeat once one of them has moved. Time is an argument.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from statistics import median

from protocol.types import Capacity, Estimates, LinkEstimate, PeerId

LEAST_FRAME_BYTES = 1 << 16
"""Smaller frames say more of timers than of the link."""

_FRAMES = 32
_LEAST_FRAMES = 4
_QUANTILE = 0.8
_ROUNDS = 5
_MOVED = 0.2
_PAUSE_SECONDS, _LONGEST_PAUSE = 5.0, 30.0
"""Between two tellings: at first short, as a plan may wait for them, then longer and longer."""
_MOST_PEERS = 64


class FrameRate:
    """Bytes per second of a link, from the arrival of its frames.

    A frame whose sender computes, or shares its line, meanwhile looks slower than the link is: so a high
    quantile of the last frames is taken. Not the highest, as a frame that waited in a buffer looks faster. A
    link that has become slower is noticed after most of those frames were seen again.
    """

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=_FRAMES)

    def frame(self, nbytes: int, seconds: float) -> None:
        """So many bytes came in so many seconds; the bytes that had come when the time began do not count."""
        if nbytes >= LEAST_FRAME_BYTES and seconds > 0:
            self._rates.append(nbytes / seconds)

    @property
    def bandwidth(self) -> float:
        """0 until enough frames have come."""
        if len(self._rates) < _LEAST_FRAMES:
            return 0.0
        return sorted(self._rates)[int(_QUANTILE * (len(self._rates) - 1))]


@dataclass
class _Neighbour:
    round_trip: float = 0.0
    bandwidth: float = 0.0
    incoming: float = 0.0
    frames: FrameRate = field(default_factory=FrameRate)

    def estimate(self, peer: PeerId) -> LinkEstimate:
        return LinkEstimate(peer, self.round_trip, self.bandwidth, self.frames.bandwidth or self.incoming)


class LiveEstimates:
    """The newest estimates of this node, and which of them the coordinator has been told.

    Args:
        capacity: as it was told when joining.
    """

    def __init__(self, capacity: Capacity) -> None:
        self.capacity = capacity
        self._microbatch_seconds = 0.0
        self._speeds: deque[float] = deque(maxlen=_ROUNDS)
        self._neighbours: OrderedDict[PeerId, _Neighbour] = OrderedDict()
        self._told = Estimates(capacity)
        self._told_at, self._pause = 0.0, 0.0

    # What is measured

    def probed(self, peer: PeerId, round_trip: float, bandwidth: float, incoming: float) -> None:
        """The way to `peer`: seconds there and back, bytes per second that arrive there and here."""
        found = self._neighbour(peer)
        found.round_trip, found.bandwidth, found.incoming = round_trip, bandwidth, incoming

    def echoed(self, peer: PeerId, round_trip: float) -> None:
        self._neighbour(peer).round_trip = round_trip

    def received(self, peer: PeerId, nbytes: int, seconds: float) -> None:
        """A frame of `peer` came on a link: so many bytes after its beginning, in so many seconds."""
        self._neighbour(peer).frames.frame(nbytes, seconds)

    def computed(self, flops: float, seconds: float) -> None:
        """A round's inner phase took so many operations (protocol.algorithm.flops) and seconds of computing here."""
        if flops > 0 and seconds > 0:
            self._speeds.append(flops / seconds)
            self.capacity = replace(self.capacity, flops=median(self._speeds))

    def replica_took(self, microbatch_seconds: float) -> None:
        """What one microbatch took the replica whose first member this node is; 0 where it is none now."""
        self._microbatch_seconds = max(0.0, microbatch_seconds)

    # What is told

    @property
    def now(self) -> Estimates:
        links = tuple(found.estimate(peer) for peer, found in self._neighbours.items())
        known = tuple(link for link in links if any(_values_of(link)))
        return Estimates(self.capacity, self._microbatch_seconds, known)

    def joined(self) -> None:
        """The coordinator knows the capacity, as it is now, and nothing else."""
        self._told, self._pause = Estimates(self.capacity), 0.0

    def news(self, at: float) -> Estimates | None:
        """What to tell the coordinator at `at` (seconds), if something has moved and it is not too soon."""
        if at < self._told_at + self._pause:
            return None
        estimates = self.now
        return estimates if _has_moved(self._told, estimates) else None

    def told(self, estimates: Estimates, at: float) -> None:
        """The coordinator has heard them."""
        self._told, self._told_at = estimates, at
        self._pause = min(2 * self._pause or _PAUSE_SECONDS, _LONGEST_PAUSE)

    def _neighbour(self, peer: PeerId) -> _Neighbour:
        found = self._neighbours.pop(peer, None) or _Neighbour()
        self._neighbours[peer] = found
        if len(self._neighbours) > _MOST_PEERS:
            self._neighbours.popitem(last=False)
        return found


def _has_moved(before: Estimates, after: Estimates) -> bool:
    """Whether a value has moved by more than a fifth, or was not there."""
    told = {link.peer: link for link in before.links}
    pairs: list[tuple[float, float]] = [
        (before.microbatch_seconds, after.microbatch_seconds),
        *zip(_speeds_of(before.capacity), _speeds_of(after.capacity), strict=True),
    ]
    for link in after.links:
        pairs += zip(_values_of(told.get(link.peer)), _values_of(link), strict=True)
    return any(abs(new - old) > _MOVED * old for old, new in pairs)


def _speeds_of(capacity: Capacity) -> Iterator[float]:
    yield from (capacity.memory_bytes, capacity.flops, capacity.uplink, capacity.downlink)
    yield capacity.round_trip


def _values_of(link: LinkEstimate | None) -> tuple[float, float, float]:
    return (0.0, 0.0, 0.0) if link is None else (link.round_trip, link.bandwidth, link.incoming)
