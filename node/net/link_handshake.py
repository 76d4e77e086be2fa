"""The greeting of a link: each end tells which member it is, and checks that the other is the expected one.

Both ends show certificates of the run. Each end accepts only the peer that the plan names for the other end.
The dialling end checks this while it connects, the accepting end after it has read the greeting.
"""

from __future__ import annotations

from node.net.link import LinkMember, refusal
from protocol.errors import ErrorCode, HetnodeError
from protocol.pb import hetnode_pb2 as pb
from protocol.types import PROTOCOL_VERSION
from protocol.wire.framing import CHUNK_BYTES
from protocol.wire.link_message import LinkMessage
from protocol.wire.versions import OLDEST_PROTOCOL, common_version

# gRPC's pings on an idle link find dead neighbours within twice as long, and routers keep the connection.
KEEPALIVE_SECONDS = 5.0
SERVICE = "hetnode.v1.StageLink"


def stream_options() -> tuple[tuple[str, int], ...]:
    """gRPC settings of a link, the same at both ends."""
    keepalive = round(KEEPALIVE_SECONDS * 1000)
    return (
        ("grpc.max_receive_message_length", CHUNK_BYTES + 4096),
        ("grpc.max_send_message_length", CHUNK_BYTES + 4096),
        ("grpc.server_handshake_timeout_ms", 10_000),
        ("grpc.keepalive_time_ms", keepalive),
        ("grpc.keepalive_timeout_ms", keepalive),
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 2000),
        ("grpc.http2.max_pings_without_data", 0),  # no limit: a link is idle while its replica waits
        # By default a server treats frequent pings on an idle connection as an attack.
        ("grpc.http2.min_ping_interval_without_data_ms", keepalive // 4),
    )


def hello_of(endpoint: LinkMember) -> LinkMessage:
    """The first message of each end."""
    return LinkMessage(
        hello=pb.Hello(
            protocol_version=PROTOCOL_VERSION,
            oldest_protocol=OLDEST_PROTOCOL,
            run=endpoint.run,
            spec_hash=endpoint.spec_hash,
            peer=endpoint.peer,
            replica=endpoint.replica,
            position=endpoint.position,
            epoch=endpoint.epoch,
            round=endpoint.round_number,
        )
    )


def hello_in(message: LinkMessage | None) -> pb.Hello | None:
    """The greeting in the first message of the other end; None if there is none. Raises VERSION_MISMATCH."""
    if message is None or message.hello is None or message.chunk is not None:
        return None
    hello = message.hello
    common_version("one end of the link", "the other", hello.protocol_version, hello.oldest_protocol)
    return hello


def check_hello(hello: pb.Hello, expected: LinkMember) -> None:
    """Raises HetnodeError unless the other end is `expected`: SPEC_MISMATCH, UNKNOWN_PEER."""
    if hello.spec_hash != expected.spec_hash or hello.run != expected.run:
        raise HetnodeError(
            ErrorCode.SPEC_MISMATCH,
            f"The neighbour has run {hello.run!r:.80} with spec {hello.spec_hash!r:.80}, this node has "
            f"{expected.run} with {expected.spec_hash}.",
            "Let both join through the same coordinator.",
        )
    if (hello.epoch, hello.round) != (expected.epoch, expected.round_number):
        raise refusal(
            ErrorCode.UNKNOWN_PEER,
            f"{expected.peer} is expected in round {expected.round_number} of plan {expected.epoch}, "
            f"not in round {hello.round} of plan {hello.epoch}",
        )
    if (hello.peer, hello.replica, hello.position) != (expected.peer, expected.replica, expected.position):
        raise refusal(
            ErrorCode.UNKNOWN_PEER,
            f"expected {expected.peer} at position {expected.position} of replica {expected.replica}, "
            f"not {hello.peer!r:.80} at {hello.position} of {hello.replica}",
        )


def unreachable(neighbour: LinkMember, why: str) -> HetnodeError:
    return HetnodeError(
        ErrorCode.NEIGHBOUR_UNREACHABLE,
        f"{neighbour.name} cannot be reached: {why}.",
        "Check that its advertised address and port are open to this machine.",
    )
