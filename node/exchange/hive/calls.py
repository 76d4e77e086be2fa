"""The calls of the main process to the hivemind host, and through it to the averagers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from node.checkpoint.download import CheckpointDownload
from node.exchange.object_source import LentPart, LentPayloads
from node.exchange.transport import Entry, ExchangeResult, RoundEnd, ServedStages
from node.ipc.stored_payload import StoredPayload
from protocol.spec.run import RunSpec
from protocol.types import ExchangeGroup, ManifestEntry, PayloadDescriptor, PeerId, Verdict
from protocol.wire.record_codec import Blob
from protocol.wire.typed_calls import Answer_co, Request


@dataclass(frozen=True, kw_only=True)
class HiveRequest(Request[Answer_co]):
    """A request with `deadline`: the seconds within which it must be answered."""

    deadline: float


@dataclass(frozen=True)
class Wake(HiveRequest[None]):
    """Answered as soon as the host has imported its modules."""


@dataclass(frozen=True)
class DhtJoined:
    """This peer's id as libp2p derives it, and its multiaddresses; there are none in client mode."""

    peer: str
    addresses: tuple[str, ...]


@dataclass(frozen=True)
class JoinDht(HiveRequest[DhtJoined]):
    """Fork the DHT process and join a DHT, or begin one. Before it there is only Wake.

    Attributes:
        identity: the file of the key of `peer`.
        folder: holds this node's sockets.

    Raises:
        HetnodeError: PORT_IN_USE, BAD_ADDRESS, DHT_UNREACHABLE.
    """

    entry: Entry
    peer: PeerId
    identity: Path
    folder: Path


@dataclass(frozen=True)
class HostStages(HiveRequest[None]):
    """Fork one averager for each stage; see :meth:`node.exchange.transport.Transport.host_stages`."""

    hosted: ServedStages


@dataclass(frozen=True)
class HostArbiter(HiveRequest[None]):
    """Fetch and serve contested payloads from now on, kept in `folder`. The allow list is that of Admit."""

    spec: RunSpec
    folder: Path


@dataclass(frozen=True)
class ArbitratePayload(HiveRequest[Verdict]):
    """See :meth:`node.exchange.arbiter.PayloadArbiter.arbitrate`; `deadline` bounds the fetching."""

    descriptor: PayloadDescriptor
    donors: tuple[PeerId, ...]


@dataclass(frozen=True)
class ForgetPayloads(HiveRequest[None]):
    """Drop the contested payloads of the rounds before `before_round`."""

    before_round: int


@dataclass(frozen=True)
class Publish(HiveRequest[None]):
    """Store the sealed record of `peer` in the DHT until `expires` (Unix time). Raises DHT_UNREACHABLE."""

    peer: PeerId
    sealed: Blob
    expires: float


@dataclass(frozen=True)
class Lookup(HiveRequest[Mapping[str, Blob]]):
    """The sealed records of the run by the peer in their subkey, not verified. Raises DHT_UNREACHABLE."""


@dataclass(frozen=True)
class Admit(HiveRequest[None]):
    """Replace the allow list of the averagers by `peers`, and the banned peers of the DHT by `banned`.

    Connections are accepted only from `sources` and from this machine itself, and only of `members`; None
    leaves the members as they are.
    """

    peers: tuple[PeerId, ...]
    banned: tuple[PeerId, ...]
    sources: tuple[str, ...]
    members: tuple[PeerId, ...] | None


@dataclass(frozen=True)
class DropConnections(HiveRequest[None]):
    """Close the connections to `peers`, if there are any: the next call to one of them opens another."""

    peers: tuple[PeerId, ...]


@dataclass(frozen=True)
class DialPeers(HiveRequest[None]):
    """Dial each of these peers at this multiaddress, to stay connected to those that Admit names."""

    addresses: Mapping[str, str]


@dataclass(frozen=True)
class Exchange(HiveRequest[ExchangeResult]):
    """See :meth:`node.exchange.transport.Transport.exchange`.

    `averager` is the stage whose averager answers; the host only forwards this call and the next three.
    """

    averager: int
    payload: Blob
    descriptor: PayloadDescriptor
    group: ExchangeGroup | None
    expected: int
    lent: LentPayloads | None = None


@dataclass(frozen=True)
class EndRound(HiveRequest[None]):
    """See :meth:`node.exchange.transport.Transport.end_round`."""

    averager: int
    ended: RoundEnd


@dataclass(frozen=True)
class FetchPayload(HiveRequest[StoredPayload]):
    """See :meth:`node.exchange.transport.Transport.fetch_payload`."""

    averager: int
    entry: ManifestEntry
    lent: LentPayloads | None = None


@dataclass(frozen=True)
class FetchCheckpoint(HiveRequest[None]):
    """See :meth:`node.exchange.transport.Transport.fetch_checkpoint`."""

    averager: int
    download: CheckpointDownload
    lent: LentPart | None = None


AVERAGER_REQUESTS = (Exchange, EndRound, FetchPayload, FetchCheckpoint)
"""The requests that the host forwards to an averager."""
