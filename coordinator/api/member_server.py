"""The gRPC server of the API for members: its bounds, and the admission of calls."""

from __future__ import annotations

import logging
from collections.abc import Callable

import grpc

from coordinator.api.access import AccessControl
from coordinator.run.command_loop import Stopped
from protocol.server.calls import CallInterceptor, CallPolicy
from protocol.server.limits import FairShare
from protocol.spec.run import RunSpec
from protocol.trust.names import identity_of

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 4 << 20
MAX_CALLS = 16_384
"""Concurrent calls: every member keeps a Watch open, and a few waiting calls for each stage."""
# A host waits with one call for each of its stages, and may repeat a call whose answer was lost.
SPARE_CALLS = 32
CALLS_PER_STAGE = 4
HANDSHAKE_MS = 10_000
_IDLE_MS = 600_000
"""A connection without calls for so long is closed. Members always have a call open, by which they watch."""


def calls_of_one(spec: RunSpec) -> int:
    """How many calls one caller may have open."""
    return SPARE_CALLS + CALLS_PER_STAGE * spec.swarm.stages


def admission(
    access: AccessControl, spec: RunSpec, source_of: Callable[[str], str], drop: Callable[[str], None]
) -> CallInterceptor:
    """Counts calls by certificate. `source_of` and `drop` a connection, by gRPC's name of the client."""
    calls = FairShare(calls_of_one(spec), MAX_CALLS)
    return CallInterceptor(CallPolicy(identity_of, source_of, drop, access.check, calls, Stopped, log))


def new_server(admission: CallInterceptor, spec: RunSpec, *options: tuple[str, int]) -> grpc.aio.Server:
    """A server with bounded messages and calls, with neither port nor services yet."""
    return grpc.aio.server(
        interceptors=(admission,),
        options=(
            *options,
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            # More than one caller may have open, so that it is told about its limit. Not many more: each call
            # takes 14 kB until it is refused.
            ("grpc.max_concurrent_streams", 2 * calls_of_one(spec)),
            # Above 1,000 calls that it has not handed over yet, gRPC cancels some at random: all members of a
            # large swarm call at once.
            ("grpc.server.max_pending_requests", MAX_CALLS),
            ("grpc.server.max_pending_requests_hard_limit", MAX_CALLS),
            ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
            ("grpc.max_connection_idle_ms", _IDLE_MS),
            # A client that is gone without a word keeps neither its connection nor its calls.
            ("grpc.keepalive_time_ms", 60_000),
            ("grpc.keepalive_timeout_ms", 20_000),
            # Members send keepalives: routers forget connections without traffic.
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ),
    )
