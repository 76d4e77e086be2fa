"""The bytes that peers send and receive in an outer exchange; M is the number of replicas."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Protocol

from coordinator.placement.cost_model import Survey
from coordinator.run.state.lines import rounded_rate, with_most_uplink
from protocol.group.gathering import schedule_of
from protocol.math import embedding_snapshot
from protocol.spec.exchanges import EXCHANGES
from protocol.spec.outer import OuterSpec
from protocol.spec.run import RunSpec
from protocol.types import Member, MemberLine, PeerId, Replica


@dataclass(frozen=True)
class Traffic:
    """Bytes that a peer sends and receives."""

    sent: float = 0.0
    received: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.sent + other.sent, self.received + other.received)

    def __mul__(self, factor: float) -> Traffic:
        return Traffic(self.sent * factor, self.received * factor)


class ExchangeTraffic(Protocol):
    """What the exchange of a run sends and receives, in payloads."""

    def payloads(
        self, outer: OuterSpec, stage: int, lines: Mapping[PeerId, MemberLine]
    ) -> Mapping[PeerId, tuple[float, float]]:
        """What each member of a group sends and receives in an exchange of `stage`."""

    def download(self, outer: OuterSpec, uplinks: Mapping[PeerId, float]) -> tuple[tuple[PeerId, ...], float]:
        """Who sends what others fetch of an exchange of members with `uplinks`, and its size."""


class GatheredTraffic:
    """The traffic of members who gather each other's payloads."""

    def payloads(
        self, outer: OuterSpec, stage: int, lines: Mapping[PeerId, MemberLine]
    ) -> dict[PeerId, tuple[float, float]]:
        others, schedule = len(lines) - 1, schedule_of(str(stage), lines)
        sent = {} if schedule is None else dict(zip(schedule.members, schedule.copies, strict=True))
        return {peer: (sent.get(peer, others), others) for peer in lines}

    def download(self, outer: OuterSpec, uplinks: Mapping[PeerId, float]) -> tuple[tuple[PeerId, ...], float]:
        return with_most_uplink(uplinks), len(uplinks)


def traffic_of(spec: RunSpec) -> ExchangeTraffic:
    """The traffic of the exchange that ``outer.exchange`` names."""
    path = EXCHANGES[spec.outer.exchange].traffic
    traffic: ExchangeTraffic = resolve_name(path)() if path else GatheredTraffic()
    return traffic


def payload_traffic(
    spec: RunSpec, survey: Survey, replicas: Sequence[Replica], payload_bytes: Sequence[int]
) -> dict[PeerId, Traffic]:
    """Traffic of the exchange between the hosts of each stage; a stage with 0 bytes exchanges nothing."""
    due = [stage for stage, nbytes in enumerate(payload_bytes) if nbytes]
    traffic: defaultdict[PeerId, Traffic] = defaultdict(Traffic)
    for stage in due:
        hosts = [replica.host_of(stage) for replica in replicas]
        lines = {host.peer: _line(survey, host, len({*due} & {*host.stages})) for host in hosts}
        payloads = traffic_of(spec).payloads(spec.outer, stage, lines)
        for peer, (sent, received) in payloads.items():
            traffic[peer] += Traffic(sent, received) * payload_bytes[stage]
    return dict(traffic)


def _line(survey: Survey, host: Member, stages: int) -> MemberLine:
    """The line of a member in a round in which it exchanges `stages` stages: each has an equal part of it."""
    capacity = survey.capacity(host.peer)
    uplink, downlink = (rounded_rate(rate / stages) for rate in (capacity.uplink, capacity.downlink))
    return MemberLine(uplink, downlink, bool(host.endpoint) and not host.relayed)


def embedding_traffic(
    spec: RunSpec, survey: Survey, replicas: Sequence[Replica], payload: int
) -> dict[PeerId, Traffic]:
    """Traffic of what members without stage 0 fetch of its exchange, in equal parts from its senders."""
    followers = [member.peer for replica in replicas for member in replica.members[1:]]
    uplinks = {host: survey.capacity(host).uplink for host in (each.members[0].peer for each in replicas)}
    hosts, payloads = traffic_of(spec).download(spec.outer, uplinks)
    nbytes = payloads * payload
    received = dict.fromkeys(followers, Traffic(received=nbytes))
    sent = dict.fromkeys(hosts, Traffic(sent=len(followers) / len(hosts) * nbytes))
    return {**received, **sent}


def snapshot_traffic(spec: RunSpec, survey: Survey, replicas: Sequence[Replica]) -> dict[PeerId, Traffic]:
    """Traffic of one snapshot of the embedding for members without stage 0, from all members."""
    nbytes = embedding_snapshot.BYTES_PER_VALUE * spec.model.vocabulary * spec.model.width
    followers = [member.peer for replica in replicas for member in replica.members[1:]]
    uplinks = {
        member.peer: survey.capacity(member.peer).uplink for each in replicas for member in each.members
    }
    together, whole = sum(uplinks.values()), len(followers) * nbytes
    sent = {
        peer: Traffic(sent=whole * (uplink / together if together else 1 / len(uplinks)))
        for peer, uplink in uplinks.items()
    }
    return sent | {peer: sent[peer] + Traffic(received=nbytes) for peer in followers}
