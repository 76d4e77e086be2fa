"""What a node counts of its own work, and what it waits for: :mod:`node.monitoring.node_metrics` shows it."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum

from node.net.membership import Membership
from node.net.waiting import CoordinatorWait
from protocol.server.line import Line
from protocol.spec.run import RunSpec
from protocol.status import Measurement, Wait
from protocol.types import PeerId


class Activity(StrEnum):
    """What a node does: it starts, follows the rounds, trains in them, or rests."""

    STARTING = "starting"
    FOLLOWING = "following"
    TRAINING = "training"
    RESTING = "resting"


class Waits:
    """What a node waits for now, and how long it has waited for each thing.

    Several tasks may wait for the same at the same time: that time counts once.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiting: Counter[Wait] = Counter()
        self._since: dict[Wait, float] = {}
        self._seconds: defaultdict[Wait, float] = defaultdict(float)

    @contextmanager
    def on(self, what: Wait) -> Iterator[None]:
        """The block waits for `what`."""
        if not self._waiting[what]:
            self._since[what] = self._clock()
        self._waiting[what] += 1
        try:
            yield
        finally:
            self._waiting[what] -= 1
            if not self._waiting[what]:
                self._seconds[what] += self._clock() - self._since.pop(what)

    def is_waiting(self, what: Wait) -> bool:
        return self._waiting[what] > 0

    @property
    def now(self) -> tuple[Wait, ...]:
        """All that it waits for now."""
        return tuple(what for what in Wait if self.is_waiting(what))

    def seconds(self, what: Wait) -> float:
        """How long the node has waited for it, up to now."""
        since = self._since.get(what)
        return self._seconds[what] + (0.0 if since is None else self._clock() - since)


class NodeFigures:
    """The figures of one process of ``hetnode join``, over all its visits. Those who do the work set them.

    Attributes:
        run, peer, device: "" before the node has joined for the first time.
        wait: of the present visit for its coordinator, and for room in the run.
        membership: that of the present visit, once the node has joined; else None.
        inner_steps: trained, also those beyond H.
        rounds, tokens, payload_bytes, phase_seconds: sums over the rounds that this node has measured;
            `tokens` are those of its replica.
        newest: the newest measurement.
        line: what this node may send and receive; it counts the bytes of the present visit.
        spec: of the run; None before the node has joined.
        memory_bytes: that the worker held on its device at the end of the last inner phase.
    """

    def __init__(self) -> None:
        self.activity = Activity.STARTING
        self.waits = Waits()
        self.run, self.peer, self.device = "", "", ""
        self.wait: CoordinatorWait | None = None
        self.membership: Membership | None = None
        self.spec: RunSpec | None = None
        self.line, self._sent, self._received = Line(), 0, 0
        self.inner_steps = self.rounds = self.tokens = self.payload_bytes = self.memory_bytes = 0
        self.phase_seconds: defaultdict[str, float] = defaultdict(float)
        self.newest: Measurement | None = None

    def joined(self, peer: PeerId, membership: Membership) -> None:
        """Note that a visit has begun."""
        self.run, self.peer, self.device = membership.run, peer, membership.estimates.capacity.device
        self.membership = membership
        membership.waits = lambda: self.waits.now
        self._sent, self._received = self.sent_bytes, self.received_bytes
        self.line = membership.estimates.line

    @property
    def place(self) -> str:
        """In the waiting list of an open run, with an estimate; "" while this node does not wait there."""
        return self.wait.place if self.wait else ""

    @property
    def sent_bytes(self) -> int:
        """Sent over links and in probes."""
        return self._sent + self.line.up.passed

    @property
    def received_bytes(self) -> int:
        """Received over links and in probes."""
        return self._received + self.line.down.passed

    def measured(self, measurement: Measurement) -> None:
        """Note what this member measured in a round. Round 0 is the model before the first round."""
        self.newest = measurement
        if not measurement.round_number:
            return
        self.rounds += 1
        self.tokens += measurement.tokens
        self.payload_bytes += measurement.payload_bytes
        self.phase_seconds["inner"] += measurement.inner_seconds
        self.phase_seconds["outer"] += measurement.outer_seconds
        self.phase_seconds["compute"] += measurement.compute_seconds
