"""Estimates of this node's speed and of its links, updated while it trains.

A heartbeat reports them to the coordinator when one of them has changed. Time is an argument.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field, replace
from statistics import median

from protocol.server.line import UNLIMITED, Line
from protocol.types import Capacity, Estimates, LinkEstimate, PeerId

LEAST_FRAME_BYTES = 1 << 16  # the time of a smaller frame depends more on timers than on the link

_FRAMES = 32  # frames that the rate of a link is estimated from
_LEAST_FRAMES = 4
_QUANTILE = 0.8
_ROUNDS = 5  # inner phases in the median of the speed: one slow round must not change a plan
_CHANGE = 0.2
_PAUSE_SECONDS, _LONGEST_PAUSE = 5.0, 30.0  # between two reports: short at first, as a plan may wait for them
_MOST_PEERS = 64  # the coordinator accepts no more in one message


class FrameRate:
    """Bytes per second of a link: a high quantile of the rates of its last frames.

    A frame seems slower than the link if its sender computes at the same time, or shares its connection. A
    frame that waited in a buffer seems faster, so the maximum would be wrong.
    """

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=_FRAMES)

    def frame(self, nbytes: int, seconds: float) -> None:
        """Note that `nbytes` arrived in `seconds`; bytes from before that time do not count."""
        if nbytes >= LEAST_FRAME_BYTES and seconds > 0:
            self._rates.append(nbytes / seconds)

    @property
    def bandwidth(self) -> float:
        """Bytes per second; 0 until enough frames have arrived."""
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
    """The newest estimates of this node, and the estimates that the coordinator has.

    Args:
        capacity: the capacity that was reported at joining.
        line: what this node may send and receive: no estimate of its connections is above that.
    """

    def __init__(self, capacity: Capacity, line: Line = UNLIMITED) -> None:
        self.line = line
        self.capacity = capacity
        self._microbatch_seconds = 0.0
        self._speeds: deque[float] = deque(maxlen=_ROUNDS)
        self._neighbours: OrderedDict[PeerId, _Neighbour] = OrderedDict()
        self._reported = Estimates(capacity)
        self._reported_at, self._pause = 0.0, 0.0

    @property
    def capacity(self) -> Capacity:
        """What this node offers. A connection that is not measured counts as fast as `line` allows."""
        return self._capacity

    @capacity.setter
    def capacity(self, measured: Capacity) -> None:
        up, down = self.line.up.cap(measured.uplink), self.line.down.cap(measured.downlink)
        self._capacity = replace(measured, uplink=up, downlink=down)

    # Measurements

    def probed(self, peer: PeerId, round_trip: float, bandwidth: float, incoming: float) -> None:
        """Note a probe of `peer`: seconds of a round trip, bytes per second that arrived there and here."""
        found = self._neighbour(peer)
        found.round_trip = round_trip
        found.bandwidth = min(bandwidth, self.line.up.cap(bandwidth))
        found.incoming = min(incoming, self.line.down.cap(incoming))

    def echoed(self, peer: PeerId, round_trip: float) -> None:
        self._neighbour(peer).round_trip = round_trip

    def received(self, peer: PeerId, nbytes: int, seconds: float) -> None:
        """Note a frame of `peer` on a link: `nbytes` arrived after its header, in `seconds`."""
        self._neighbour(peer).frames.frame(nbytes, seconds)

    def computed(self, flops: float, seconds: float) -> None:
        """Note an inner phase: `flops` operations (protocol.math.flops) in `seconds` of computing."""
        if flops > 0 and seconds > 0:
            self._speeds.append(flops / seconds)
            self.capacity = replace(self.capacity, flops=median(self._speeds))

    def replica_took(self, microbatch_seconds: float) -> None:
        """Note the seconds of one microbatch of this replica; 0 if this node is not its first member."""
        self._microbatch_seconds = max(0.0, microbatch_seconds)

    # Reports

    @property
    def now(self) -> Estimates:
        links = tuple(self._within_line(found.estimate(peer)) for peer, found in self._neighbours.items())
        known = tuple(link for link in links if any(_values_of(link)))
        return Estimates(self.capacity, self._microbatch_seconds, known)

    def _within_line(self, link: LinkEstimate) -> LinkEstimate:
        # A frame that is smaller than the burst of the line arrives faster than the line allows for long.
        return replace(link, incoming=min(link.incoming, self.line.down.cap(link.incoming)))

    def joined(self) -> None:
        """Note that this node has joined: the coordinator knows only the current capacity."""
        self._reported, self._pause = Estimates(self.capacity), 0.0

    def due(self, at: float) -> Estimates | None:
        """The estimates to report at time `at` (seconds); None if nothing has changed or it is too early."""
        if at < self._reported_at + self._pause:
            return None
        estimates = self.now
        return estimates if _has_changed(self._reported, estimates) else None

    def reported(self, estimates: Estimates, at: float) -> None:
        """Note that the coordinator has received `estimates`."""
        self._reported, self._reported_at = estimates, at
        self._pause = min(2 * self._pause or _PAUSE_SECONDS, _LONGEST_PAUSE)

    def _neighbour(self, peer: PeerId) -> _Neighbour:
        # Popped and inserted again: the first entry is the one that was not used for the longest time.
        found = self._neighbours.pop(peer, None) or _Neighbour()
        self._neighbours[peer] = found
        if len(self._neighbours) > _MOST_PEERS:
            self._neighbours.popitem(last=False)
        return found


def _has_changed(before: Estimates, after: Estimates) -> bool:
    """Whether a value has changed by more than a fifth, or is new."""
    known = {link.peer: link for link in before.links}
    pairs: list[tuple[float, float]] = [
        (before.microbatch_seconds, after.microbatch_seconds),
        *zip(_speeds_of(before.capacity), _speeds_of(after.capacity), strict=True),
    ]
    for link in after.links:
        pairs += zip(_values_of(known.get(link.peer)), _values_of(link), strict=True)
    # An old value of 0 makes every new value a change.
    return any(abs(new - old) > _CHANGE * old for old, new in pairs)


def _speeds_of(of: Capacity) -> tuple[float, ...]:
    return of.memory_bytes, of.flops, of.uplink, of.downlink, of.round_trip


def _values_of(link: LinkEstimate | None) -> tuple[float, float, float]:
    return (0.0, 0.0, 0.0) if link is None else (link.round_trip, link.bandwidth, link.incoming)
