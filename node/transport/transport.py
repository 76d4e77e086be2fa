"""The interface of the network between the peers of a run, independent of the library that carries it.

:mod:`node.hive` implements it with hivemind. Another transport needs a package beside that one and one line
in :mod:`node.runtime`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from protocol.server.admitted_sources import EVERYONE
from protocol.spec.run import RunSpec
from protocol.types import (
    ExchangeGroup,
    ManifestEntry,
    PayloadDescriptor,
    PeerId,
    PeerRecord,
    Rejection,
    ResultClaim,
    StateRecord,
)


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
class CheckpointDownload:
    """One part of a checkpoint, and the peers that have it.

    Attributes:
        record: signed by the coordinator.
        donors: the peers to ask, and for each peer one stage that it hosts.
        nbytes, header: of the part, from the spec (protocol.algorithm.digest); more bytes are never accepted.
        into: the file to write; its folder is created if necessary.
    """

    record: StateRecord
    donors: Mapping[PeerId, int]
    nbytes: int
    header: str
    into: Path


@dataclass(frozen=True)
class HostedStages:
    """The stages whose payloads a node exchanges and serves, and where it keeps them.

    Attributes:
        capacities: the largest payload or result of each hosted stage, in bytes. Larger ones are refused
            unread.
        payload_folder: keeps the payloads of the newest `keep_rounds` rounds, also over a restart. Created if
            necessary. Two nodes must not share it.
        checkpoint_folder: this node's checkpoints (node.checkpoint.parts). A request gets the parts that are
            there at that time. The folder may be created later.
        spec, initial_folder: the run, and the parameters that it starts from (node.checkpoint.initial), to
            serve the anchors before round 1; without `spec` they are not served.
        reduced: the spec of a run with exchange "reduced"; None where members gather all payloads.
    """

    capacities: Mapping[int, int]
    payload_folder: Path
    checkpoint_folder: Path
    keep_rounds: int
    reduced: RunSpec | None = None
    spec: RunSpec | None = None
    initial_folder: Path | None = None

    def folder_of(self, stage: int) -> Path:
        """Where the payloads of one stage are."""
        return self.payload_folder / f"stage-{stage:02d}"


class Transport(Protocol):
    """Peer records, payloads and checkpoints between this node and the other peers of its run.

    Every call has a deadline, and every failure is raised as a HetnodeError. When processes of the transport
    die, it either starts them again, or every open and every later call raises HIVEMIND_DIED.
    """

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses under which other peers reach this one; empty if it only dials."""

    async def host_stages(self, hosted: HostedStages) -> None:
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

    async def fetch_payload(self, entry: ManifestEntry, deadline: float) -> bytes:
        """The payload of a manifest entry, from this node's store or by hash from one of its holders.

        This node must host some stage, not necessarily that of the payload. `entry.holders` may name any
        peers of the allow list that could have the payload.

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
