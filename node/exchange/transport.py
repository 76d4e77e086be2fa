"""The interface of the network between the peers of a run, independent of the library that carries it.

A transport is a package with two modules: ``transport`` implements :class:`TransportPackage`, and ``host`` is
the process that the transport starts, which the template of a node imports early. :mod:`node.ipc.modules`
names the package in use: another transport needs its own package and that one line.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Protocol, TypeAlias, cast

from node.checkpoint.download import CheckpointDownload
from node.exchange.allow_list import AllowList
from node.exchange.object_source import NO_OBJECTS, ObjectSource
from node.ipc import modules
from node.ipc.stored_payload import StoredPayload
from node.security.identity import Identity
from protocol.errors import ErrorCode, HetnodeError
from protocol.group.peers import PeerRecord
from protocol.server.admitted_sources import EVERYONE
from protocol.server.line import UNLIMITED, Line
from protocol.spec.exchanges import EXCHANGES
from protocol.spec.run import RunSpec
from protocol.types import (
    ExchangeGroup,
    ManifestEntry,
    PayloadDescriptor,
    PeerId,
    Rejection,
    ResultClaim,
    Verdict,
)


@dataclass(frozen=True)
class Entry:
    """How a peer enters the network of its run.

    Attributes:
        run: the id of the run, in keys, names of calls and signatures; it has no dots.
        certificate, authority: PEM files; a replaced certificate is read again.
        initial_peers: multiaddresses of the DHT to join; empty starts a new one.
        listen_host, listen_port: the interface to listen on, by address or name; port 0 takes a free one, and
            the same one after a restart.
        advertise, advertise_port: host and port told to other peers; None and 0 are those to listen on.
        client_mode: only dial; else connections are accepted from `sources`, see :meth:`Transport.admit`.
        stays_connected: also stay connected to all admitted peers, as in client mode.
        members: the peers whose connections are accepted; None accepts all until they are admitted.
        clock_offset: seconds by which the coordinator's clock is ahead; the DHT needs it right to 3 s.
    """

    run: str
    certificate: Path
    authority: Path
    initial_peers: tuple[str, ...] = ()
    listen_host: str = "127.0.0.1"
    listen_port: int = 0
    advertise: str | None = None
    advertise_port: int = 0
    client_mode: bool = False
    stays_connected: bool = False
    sources: tuple[str, ...] = EVERYONE
    members: tuple[PeerId, ...] | None = None
    clock_offset: float = 0.0


Enter: TypeAlias = Callable[[], Awaitable[Entry]]
"""Called at each start of a transport's processes: addresses and members may have changed since the last."""


@dataclass(frozen=True)
class ExchangeResult:
    """The result of one exchange of payloads.

    `held` are payloads that this peer now has and serves to other peers, ordered by owner. `rejected` are
    payloads that an honest peer would not have announced or sent. `claim` names the result of a reduction if
    this peer has all of its parts; the result is served like a payload.
    """

    held: tuple[PayloadDescriptor, ...]
    rejected: tuple[Rejection, ...] = ()
    claim: ResultClaim | None = None


@dataclass(frozen=True)
class RoundEnd:
    """How a (stage, round) ended, for those that reduce parts of it.

    `result` is the hash of the committed result; None if the round was aborted or rolled back.
    """

    stage: int
    round_number: int
    result: str | None = None
    rolled_back: bool = False


@dataclass(frozen=True)
class ServedStages:
    """The stages whose payloads a node exchanges and serves, and where it keeps them.

    Attributes:
        capacities: the largest payload or result of each hosted stage, in bytes. Larger ones are refused
            unread.
        payload_folder: keeps the payloads of the newest `keep_rounds` rounds, also over a restart. Created if
            necessary. Two nodes must not share it.
        checkpoint_folder: this node's checkpoints (node.checkpoint.parts). A request gets the parts that are
            there at that time. The folder may be created later.
        spec: of the run; without it members gather payloads, and the anchors before round 1 are not served.
        initial_folder: the parameters that the run starts from (node.checkpoint.initial).
    """

    capacities: Mapping[int, int]
    payload_folder: Path
    checkpoint_folder: Path
    keep_rounds: int
    spec: RunSpec | None = None
    initial_folder: Path | None = None

    def folder_of(self, stage: int) -> Path:
        """Where the payloads of one stage are."""
        return self.payload_folder / f"stage-{stage:02d}"


class MemberExchange(Protocol):
    """The exchange of one stage whose members agree on one result, as protocol.spec.exchanges names it."""

    async def serve(self, allow_list: AllowList) -> None:
        """Answer the peers of the allow list from now on."""

    async def reduce(
        self, own: PayloadDescriptor, payload: bytes, group: ExchangeGroup, seconds: float
    ) -> ExchangeResult:
        """Agree with a group of the coordinator. Without a result this peer fetches that of the others."""

    def break_off(self) -> None:
        """End :meth:`reduce` now, without a result: its caller has given up."""

    async def end_round(self, ended: RoundEnd) -> None:
        """See :meth:`Transport.end_round`."""


def member_exchange(spec: RunSpec | None) -> Any:
    """The class of the :class:`MemberExchange` of a run; None where members gather payloads."""
    path = "" if spec is None else EXCHANGES[spec.outer.exchange].members
    return resolve_name(f"{modules.TRANSPORT}.{path}") if path else None


class Transport(Protocol):
    """Peer records, payloads and checkpoints between this node and the other peers of its run.

    Every call has a deadline, and every failure is raised as a HetnodeError. When processes of the transport
    die, it starts them again, with the same id and port, stages, allow list and record. A call that this
    interrupts is made again. If they cannot be started within a minute, a call fails as if the network were
    away: it raises DHT_UNREACHABLE, STATE_UNAVAILABLE or TRANSPORT_DIED, and an exchange has no result.
    """

    @property
    def addresses(self) -> tuple[str, ...]:
        """Multiaddresses under which other peers reach this one; empty if it only dials."""

    async def host_stages(self, hosted: ServedStages) -> None:
        """Begin to exchange and serve payloads of these stages, and to serve checkpoints. Call it once.

        A disk that refuses payloads is no failure: the log warns, and memory holds them for some rounds.
        """

    async def admit(
        self,
        peers: Collection[PeerId],
        banned: Collection[PeerId] = (),
        sources: Collection[str] = EVERYONE,
        members: Collection[PeerId] | None = None,
    ) -> None:
        """Replace the allow list, which is empty at first, and whose connections are accepted.

        Args:
            peers: the peers of the plan. They may exchange payloads, and fetch payloads and checkpoints.
            banned: peers refused for every call. All other certified peers may read and write DHT records.
            sources: IPv4 addresses, IPv6 /64s and networks as text. Connections of others are closed, but
                this machine itself can always connect.
            members: connections of other peers end after the handshake; None leaves the members as they are.

        Raises HetnodeError DHT_UNREACHABLE.
        """

    async def disconnect(self, peers: Collection[PeerId]) -> None:
        """Close the connections to `peers`, which are dead: the next calls open new ones.

        Raises HetnodeError DHT_UNREACHABLE.
        """

    async def contact(self, addresses: Mapping[str, str]) -> None:
        """Dial each of these peers at this multiaddress, if this peer stays connected to others.

        A restarted transport must be told again. Raises HetnodeError DHT_UNREACHABLE.
        """

    async def restart(self) -> None:
        """Enter the network again: what others are told follows from an :class:`Entry` that is made now."""

    async def publish(self, record: PeerRecord, ttl: float) -> None:
        """Sign `record` and let other peers find it for `ttl` seconds.

        Raises HetnodeError DHT_UNREACHABLE if no peer accepted it.
        """

    async def lookup(self) -> dict[PeerId, PeerRecord]:
        """The records of this run that the DHT has now, each signed by its own certified peer.

        Raises HetnodeError DHT_UNREACHABLE.
        """

    async def exchange(
        self,
        payload: bytes,
        descriptor: PayloadDescriptor,
        group: ExchangeGroup | None,
        *,
        expected: int,
        deadline: float,
    ) -> ExchangeResult:
        """All-gather the payloads of one (stage, round) in a group of peers, or reduce them in parts.

        A failed exchange is a normal event: then this peer holds only its own payload, and no result. Without
        the coordinator's group nothing is reduced.

        Args:
            descriptor: of this peer's `payload`, signed by this peer. Its stage must be hosted.
            group: the group that the coordinator matched; None lets the transport find a group itself.
            expected: size of the full group; only used without `group`.
            deadline: seconds from now. A payload that has not arrived by then is not in the result.
        """

    async def end_round(self, ended: RoundEnd) -> None:
        """Settle what this peer has reduced of an exchanged (stage, round), whose result it has fetched.

        What its reducers hold back for later rounds changes with a committed round, and only then.
        """

    async def fetch_payload(self, entry: ManifestEntry, deadline: float) -> StoredPayload:
        """The payload of a manifest entry, from this node's store or by hash from one of its holders.

        Its file stays until a later round comes. This node must host some stage, not necessarily that of the
        payload. `entry.holders` may name any peers of the allow list that could have the payload.

        Raises HetnodeError: PAYLOAD_UNAVAILABLE when no holder sent the right bytes within `deadline`
        seconds; PAYLOAD_CORRUPT when its length exceeds the capacity of its stage.
        """

    async def fetch_checkpoint(self, download: CheckpointDownload, deadline: float) -> None:
        """Download one part of a checkpoint into a file, from several donors at the same time.

        This node must host some stage, not necessarily that of the record. Every chunk is verified before it
        is written. Right chunks that the file already has are not fetched: the next call continues a failed
        download. A donor that sends wrong bytes, or fails several times in a row, is not asked again.

        Raises HetnodeError: STATE_UNAVAILABLE, with the reason of each donor, if the file is not complete
        within `deadline` seconds or no donor is left; DISK_FULL.
        """

    async def wait_closed(self) -> None:
        """Return when the transport has ended: after :meth:`close`, or after the death of a process."""

    async def close(self) -> None:
        """End the transport and all its processes. May be called again."""


class ArbiterPeer(Protocol):
    """The coordinator's own peer: the first of the DHT, and the arbiter of contested payloads.

    It outlives its processes as a :class:`Transport` does.
    """

    @property
    def addresses(self) -> tuple[str, ...]:
        """Multiaddresses under which other peers reach this one."""

    @property
    def port(self) -> int:
        """The port on which it listens."""

    @property
    def arbiter(self) -> ArbiterPeer | None:
        """This peer: it arbitrates, and does not only serve the DHT."""

    async def admit(
        self,
        peers: Collection[PeerId],
        banned: Collection[PeerId] = (),
        sources: Collection[str] = EVERYONE,
        members: Collection[PeerId] | None = None,
    ) -> None:
        """See :meth:`Transport.admit`."""

    async def publish(self, record: PeerRecord, ttl: float) -> None:
        """See :meth:`Transport.publish`."""

    async def arbitrate(
        self, descriptor: PayloadDescriptor, donors: Sequence[PeerId], deadline: float
    ) -> Verdict:
        """See :meth:`node.exchange.arbiter.PayloadArbiter.arbitrate`. Raises PAYLOAD_UNAVAILABLE."""

    async def forget_payloads(self, before_round: int) -> None:
        """Drop the contested payloads of the rounds before `before_round`. Raises PAYLOAD_UNAVAILABLE."""

    async def close(self) -> None:
        """End this peer and all its processes. May be called again."""


class TransportPackage(Protocol):
    """What the module ``transport`` of a transport's package has.

    Both functions start its processes, and raise HetnodeError PORT_IN_USE, BAD_ADDRESS, DHT_UNREACHABLE or
    TRANSPORT_DIED if the first start fails. They leave nothing behind then.
    """

    async def start(
        self,
        identity: Identity,
        enter: Enter,
        line: Line = UNLIMITED,
        objects: ObjectSource = NO_OBJECTS,
    ) -> Transport:
        """Enter the network as `identity`; `line` bounds payloads and checkpoints.

        `objects` is one more source of them, which a transport may leave alone.
        """

    async def start_arbiter(
        self, identity: Identity, enter: Enter, spec: RunSpec, folder: Path
    ) -> ArbiterPeer:
        """Enter as the coordinator's peer, which keeps contested payloads of a few rounds in `folder`."""


def no_stage(code: ErrorCode) -> HetnodeError:
    """The error of a node that is to fetch something and hosts no stage."""
    return HetnodeError(
        code,
        "This node hosts no stage yet, and so cannot fetch anything.",
        "Wait until the node has its assignment in the run.",
    )


def transport_in_use() -> TransportPackage:
    """The transport that :mod:`node.ipc.modules` names."""
    return cast(TransportPackage, import_module(f"{modules.TRANSPORT}.transport"))
