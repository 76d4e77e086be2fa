"""What peers measure of themselves and of their links: capacities and estimates, to and from protobuf."""

from __future__ import annotations

from protocol.pb import hetnode_pb2 as pb
from protocol.types import Capacity, Estimates, LinkEstimate
from protocol.wire.convert.fields import INT64, Field, printable, several
from protocol.wire.convert.record import Record

MAX_ESTIMATES = 64
"""Links that one peer reports."""


def _measured(least: float, most: float) -> Field[float]:
    """A number from `least` to `most`, or 0 for not measured. Any other number, NaN too, is sent as 0."""

    def write(value: float) -> float:
        return value if least <= value <= most else 0.0

    def read(value: float) -> float:
        if value != write(value):
            raise ValueError(f"{value} is neither 0 nor within {least:g} and {most:g}")
        return value

    return Field(read, write)


_RATE = _measured(1, 1e21)
"""Bytes or operations per second. The bounds keep the cost model's sums and quotients finite."""
_SECONDS = _measured(1e-9, 1e6)

CAPACITY = Record(
    Capacity,
    pb.Capacity,
    {
        "device": Field(lambda device: printable(device, empty=True)),
        "memory_bytes": INT64,
        "flops": _RATE,
        "uplink": _RATE,
        "downlink": _RATE,
        "round_trip": _SECONDS,
    },
)

_LINK_ESTIMATE = Record(
    LinkEstimate,
    pb.LinkEstimate,
    {"round_trip": _SECONDS, "bandwidth": _RATE, "incoming": _RATE},
)

ESTIMATES = Record(
    Estimates,
    pb.Estimates,
    {
        "capacity": CAPACITY,
        "microbatch_seconds": _SECONDS,
        "links": several(_LINK_ESTIMATE, MAX_ESTIMATES, key="peer"),
    },
)

capacity_to_pb, capacity_from_pb = CAPACITY.to_pb, CAPACITY.from_pb
estimates_to_pb, estimates_from_pb = ESTIMATES.to_pb, ESTIMATES.from_pb
