"""What peers measure of themselves and of their links: capacities and estimates, to and from protobuf."""

from __future__ import annotations

from protocol.pb import hetnode_pb2 as pb
from protocol.types import Capacity, Estimates, LinkEstimate
from protocol.wire.convert.fields import check_count, peer_id, printable, raises_bad_request

MAX_ESTIMATES = 64
"""Links that one peer reports."""
MAX_PER_SECOND = 1e21
"""Largest rate, in bytes or operations per second."""
LEAST_SECONDS, MAX_SECONDS = 1e-9, 1e6


def capacity_to_pb(capacity: Capacity) -> pb.Capacity:
    return pb.Capacity(
        device=capacity.device,
        memory_bytes=capacity.memory_bytes,
        threads=capacity.threads,
        flops=_rate(capacity.flops),
        uplink=_rate(capacity.uplink),
        downlink=_rate(capacity.downlink),
        round_trip=_seconds(capacity.round_trip),
    )


@raises_bad_request
def capacity_from_pb(message: pb.Capacity) -> Capacity:
    if message.memory_bytes >= 2**63:
        raise ValueError(f"a memory of {message.memory_bytes} bytes")
    return Capacity(
        printable(message.device, "the device", empty=True),
        message.memory_bytes,
        message.threads,
        flops=_measured(message.flops, "flops"),
        uplink=_measured(message.uplink, "the uplink"),
        downlink=_measured(message.downlink, "the downlink"),
        round_trip=_duration(message.round_trip, "the round trip"),
    )


def estimates_to_pb(estimates: Estimates) -> pb.Estimates:
    return pb.Estimates(
        capacity=capacity_to_pb(estimates.capacity),
        microbatch_seconds=_seconds(estimates.microbatch_seconds),
        links=[
            pb.LinkEstimate(
                peer=link.peer,
                round_trip=_seconds(link.round_trip),
                bandwidth=_rate(link.bandwidth),
                incoming=_rate(link.incoming),
            )
            for link in estimates.links
        ],
    )


@raises_bad_request
def estimates_from_pb(message: pb.Estimates) -> Estimates:
    """What a peer has measured; each other peer is named once."""
    check_count(message.links, "link estimates", MAX_ESTIMATES)
    links = tuple(
        LinkEstimate(
            peer_id(link.peer),
            _duration(link.round_trip, "a round trip"),
            _measured(link.bandwidth, "a bandwidth"),
            _measured(link.incoming, "an incoming bandwidth"),
        )
        for link in message.links
    )
    if len({link.peer for link in links}) != len(links):
        raise ValueError("a peer is estimated twice")
    seconds = _duration(message.microbatch_seconds, "the seconds of a microbatch")
    return Estimates(capacity_from_pb(message.capacity), seconds, links)


def _measured(value: float, name: str) -> float:
    if value != _rate(value):
        raise ValueError(f"{name} of {value} per second")
    return value


def _duration(value: float, name: str) -> float:
    if value != _seconds(value):
        raise ValueError(f"{name} of {value} s")
    return value


def _rate(value: float) -> float:
    """Bytes or operations per second; 0, not measured, for what nothing that takes part can have."""
    return value if 1 <= value <= MAX_PER_SECOND else 0.0


def _seconds(value: float) -> float:
    return value if LEAST_SECONDS <= value <= MAX_SECONDS else 0.0
