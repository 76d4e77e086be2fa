"""The bytes that peers send and receive in an outer exchange; M is the number of replicas."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.placement.cost_model import Survey
from coordinator.state.lines import rounded_rate, with_most_uplink
from protocol.algorithm import embedding_snapshot
from protocol.algorithm.gathering import schedule_of
from protocol.reduction.partition import checkers_of, group_shares
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


def gather_traffic(
    survey: Survey, replicas: Sequence[Replica], payload_bytes: Sequence[int]
) -> dict[PeerId, Traffic]:
    """Traffic of the payloads between the hosts of each stage; a stage with 0 bytes exchanges nothing."""
    others = len(replicas) - 1
    due = [stage for stage, nbytes in enumerate(payload_bytes) if nbytes]
    traffic: defaultdict[PeerId, Traffic] = defaultdict(Traffic)
    for stage in due:
        nbytes, hosts = payload_bytes[stage], [replica.host_of(stage) for replica in replicas]
        lines = {host.peer: _line(survey, host, len({*due} & {*host.stages})) for host in hosts}
        schedule = schedule_of(str(stage), lines)
        sent = {} if schedule is None else dict(zip(schedule.members, schedule.copies, strict=True))
        for host in hosts:
            traffic[host.peer] += Traffic(sent.get(host.peer, others) * nbytes, others * nbytes)
    return dict(traffic)


def reduction_traffic(
    spec: RunSpec, survey: Survey, replicas: Sequence[Replica], payload_bytes: Sequence[int]
) -> dict[PeerId, Traffic]:
    """Traffic of parts, copies for the checkers and sums between the hosts of each stage."""
    ratio = result_ratio(spec.outer)
    traffic: defaultdict[PeerId, Traffic] = defaultdict(Traffic)
    for stage, nbytes in enumerate(payload_bytes):
        hosts = sorted((replica.host_of(stage) for replica in replicas), key=lambda each: each.peer)
        of_hosts = reduction_of([_line(survey, host, len(host.stages)) for host in hosts], ratio)
        for host, each in zip(hosts, of_hosts, strict=True):
            traffic[host.peer] += each * nbytes
    return dict(traffic)


def reduction_of(lines: Sequence[MemberLine], ratio: float) -> list[Traffic]:
    """Traffic of each member of a group that reduces, in payloads.

    M members have payloads of P bytes; a result has Q = `ratio` P bytes. A member that reduces the share w
    and checks the share v sends and receives

        sends       (1 - w) P     its payload, to the reducers
                  + (1 - v) P     the same again, to the checkers
                  + M w Q         its sums: to M - 1 members, and to its checker to be signed
        receives    (M - 1) (w + v) P + (1 - w + v) Q

    If others can dial only one member, nobody checks it: there are no copies for checkers, and it sends its
    sums M - 1 times. If others can dial nobody, a real run reduces nothing; the forecast then presumes that
    all can be dialled.
    """
    others = len(lines) - 1
    if not others:
        return [Traffic()]
    are_open = [line.is_open for line in lines]
    able = are_open if any(are_open) else [True] * len(lines)
    exact = group_shares(able, [line.uplink for line in lines], ratio)
    checkers, shares = checkers_of(exact, able, 0), [float(each) for each in exact]
    checked = [0.0] * len(lines)
    for share, checker in zip(shares, checkers, strict=True):
        if checker is not None:
            checked[checker] += share
    has_checkers = any(each is not None for each in checkers)
    return [
        Traffic(
            1 - own + (1 - other) * has_checkers + (others + has_checkers) * own * ratio,
            others * (own + other) + (1 - own + other) * ratio,
        )
        for own, other in zip(shares, checked, strict=True)
    ]


def result_ratio(outer: OuterSpec) -> float:
    """About the bytes of a result of the reducers for each byte of a payload."""
    return outer.of_result.bits_per_parameter / outer.bits_per_parameter


def _line(survey: Survey, host: Member, stages: int) -> MemberLine:
    """The line of a member in a round in which it exchanges `stages` stages: each has an equal part of it."""
    capacity = survey.capacity(host.peer)
    uplink, downlink = (rounded_rate(rate / stages) for rate in (capacity.uplink, capacity.downlink))
    return MemberLine(uplink, downlink, bool(host.endpoint) and not host.relayed)


def embedding_traffic(
    spec: RunSpec, survey: Survey, replicas: Sequence[Replica], payload: int
) -> dict[PeerId, Traffic]:
    """Traffic of the payloads of stage 0, or of their result, for members that do not host it.

    Payloads come in equal parts from the hosts with the most uplink, results from all.
    """
    followers = [member.peer for replica in replicas for member in replica.members[1:]]
    uplinks = {host: survey.capacity(host).uplink for host in (each.members[0].peer for each in replicas)}
    hosts, nbytes = with_most_uplink(uplinks), float(len(replicas) * payload)
    if spec.outer.exchange == "reduced":
        hosts, nbytes = tuple(uplinks), payload * result_ratio(spec.outer)
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
