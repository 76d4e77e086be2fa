"""How long simulated members exchange payloads, fetch the embedding and load anchors over their lines.

A line carries bytes / rate in each direction, shared by the stages of its member. All members of a group
begin at the same time, and each has all payloads when every sender has sent its copies, which the production
schedule counts, and its own line has received them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping

from coordinator.reduction.traffic import reduction_of
from protocol.group.gathering import schedule_of
from protocol.types import Capacity, ExchangeGroup, ManifestEntry, PeerId

Capacities = Callable[[PeerId], Capacity]
"""The line of a peer."""


def gather_seconds(
    group: ExchangeGroup, stages: Mapping[PeerId, int], capacity: Capacities
) -> dict[PeerId, float]:
    """Seconds until each owner of a payload of `group` has all of them. `stages`: how many each hosts."""
    owners = [each.owner for each in group.descriptors]
    others, nbytes = len(owners) - 1, max(each.nbytes for each in group.descriptors)
    lines = dict(zip(owners, group.lines, strict=True)) if group.lines else {}
    schedule = schedule_of(group.group_id, lines)
    copies = {} if schedule is None else dict(zip(schedule.members, schedule.copies, strict=True))
    sent = {owner: copies.get(owner, others) * nbytes * stages[owner] for owner in owners}
    slowest = max(sent[owner] / capacity(owner).uplink for owner in owners)
    received = {owner: others * nbytes * stages[owner] for owner in owners}
    return {owner: max(slowest, received[owner] / capacity(owner).downlink) for owner in owners}


def reduction_seconds(
    group: ExchangeGroup, stages: Mapping[PeerId, int], capacity: Capacities, ratio: float
) -> dict[PeerId, float]:
    """Seconds until each owner of a payload of `group` has the result; see :func:`reduction_of`."""
    nbytes = max(each.nbytes for each in group.descriptors)
    owners = [each.owner for each in group.descriptors]
    traffic = dict(zip(owners, reduction_of(group.lines, ratio), strict=True))
    nbytes_of = {owner: nbytes * stages[owner] for owner in owners}
    slowest = max(traffic[owner].sent * nbytes_of[owner] / capacity(owner).uplink for owner in owners)
    return {
        owner: max(slowest, traffic[owner].received * nbytes_of[owner] / capacity(owner).downlink)
        for owner in owners
    }


def result_seconds(
    nbytes: float, hosts: Collection[PeerId], followers: Iterable[PeerId], capacity: Capacities
) -> dict[PeerId, float]:
    """Seconds until each follower has a result of `nbytes` bytes, in equal parts from all hosts."""
    followers = list(followers)
    each = nbytes * len(followers) / max(1, len(hosts))
    slowest = max((each / capacity(host).uplink for host in hosts), default=0.0)
    return {peer: max(slowest, nbytes / capacity(peer).downlink) for peer in followers}


def embedding_seconds(
    entries: Iterable[ManifestEntry], followers: Iterable[PeerId], capacity: Capacities
) -> dict[PeerId, float]:
    """Seconds until each follower has the payloads of `entries`, in equal parts from the named holders."""
    followers = list(followers)
    nbytes, sent = 0.0, Counter[tuple[PeerId, ...]]()
    for entry in entries:
        nbytes += entry.descriptor.nbytes
        sent[entry.holders] += entry.descriptor.nbytes
    uploads: dict[PeerId, float] = {}
    for holders, each in sent.items():
        for holder in holders:
            uploads[holder] = uploads.get(holder, 0.0) + each * len(followers) / len(holders)
    slowest = max((uploads[holder] / capacity(holder).uplink for holder in uploads), default=0.0)
    return {peer: max(slowest, nbytes / capacity(peer).downlink) for peer in followers}


def receive_seconds(nbytes: float, peer: PeerId, capacity: Capacities) -> float:
    """Seconds in which the line of `peer` receives so many bytes."""
    return nbytes / capacity(peer).downlink
