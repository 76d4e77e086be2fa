"""The interface of the network between the peers of a run, independent of the library that carries it.

:mod:`node.hive` implements it with hivemind. Another transport needs a package beside that one and one line
in :mod:`node.runtime`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from protocol.types import (
    ExchangeGroup,
    ManifestEntry,
    PayloadDescriptor,
    PeerId,
    PeerRecord,
    Rejection,
    StateRecord,
)


@dataclass(frozen=True)
class ExchangeResult:
    """The result of one exchange of payloads.

    Attributes:
        held: payloads that this peer now has and serves to other peers, in canonical order (by owner).
        rejected: payloads that an honest peer would not have announced or sent.
    """

    held: tuple[PayloadDescriptor, ...]
    rejected: tuple[Rejection, ...] = ()


@dataclass(frozen=True)
class CheckpointDownload:
    """One part of a checkpoint, and the peers that have it.

    Attributes:
        record: the part's record, signed by the coordinator.
        donors: the peers to ask, and for each peer one stage that it hosts.
        nbytes: size of the part, from the spec (protocol.algorithm.digest.size_of); more is never accepted.
        header: header of the part (protocol.algorithm.digest.header_of).
        into: the file to write; its folder is created if necessary.
    """

    record: StateRecord
    donors: Mapping[PeerId, int]
    nbytes: int
    header: str
    into: Path


class Transport(Protocol):
    """Peer records, payloads and checkpoints between this node and the other peers of its run.

    Every call has a deadline, and every failure is raised as a HetnodeError. When the transport's own
    processes die, every open and every later call raises HIVEMIND_DIED, and the node must be started again.
    """

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses under which other peers reach this one; empty if it only dials."""

    async def host_stages(
        self, capacities: Mapping[int, int], payload_folder: Path, checkpoint_folder: Path, keep_rounds: int
    ) -> None:
        """Begin to exchange and serve payloads of these stages, and to serve checkpoints. Call it once.

        Args:
            capacities: the largest payload of each hosted stage, in bytes. Larger ones are refused unread.
            payload_folder: keeps payloads, also over a restart; created if necessary. Two nodes must not
                share it.
            checkpoint_folder: this node's checkpoints (node.checkpoint.parts). A request gets the parts that
                are there at that time. The folder may be created later.
            keep_rounds: the number of newest rounds whose payloads are kept.

        Raises:
            HetnodeError: HIVEMIND_DIED. A disk that refuses payloads is no failure: the log warns, and memory
                holds them for some rounds.
        """

    async def admit(self, peers: Collection[PeerId], banned: Collection[PeerId] = ()) -> None:
        """Replace the allow list, which is empty at first.

        Args:
            peers: the peers of the plan. They may exchange payloads, and fetch payloads and checkpoints.
            banned: peers refused for every call. All other certified peers may read and write DHT records.

        Raises:
            HetnodeError: DHT_UNREACHABLE, HIVEMIND_DIED.
        """

    async def publish(self, record: PeerRecord, ttl: float) -> None:
        """Sign `record` and let other peers find it for `ttl` seconds.

        Raises:
            HetnodeError: DHT_UNREACHABLE if no peer accepted it; HIVEMIND_DIED.
        """

    async def lookup(self) -> dict[PeerId, PeerRecord]:
        """The records of this run that the DHT has now, each signed by its own certified peer.

        Raises:
            HetnodeError: DHT_UNREACHABLE, HIVEMIND_DIED.
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
        """All-gather the payloads of one (stage, round) in a group of peers.

        Args:
            payload: this peer's payload.
            descriptor: describes `payload`, signed by this peer. Its stage must be hosted.
            group: the group that the coordinator matched; None lets the transport find a group itself.
            expected: size of the full group; only used without `group`.
            deadline: seconds from now. A payload that has not arrived by then is not in the result.

        Returns:
            the payloads that this peer holds, with its own, and those that it refused. A failed exchange is a
            normal event: then this peer holds only its own payload.

        Raises:
            HetnodeError: HIVEMIND_DIED.
        """

    async def fetch_payload(self, entry: ManifestEntry, deadline: float) -> bytes:
        """The payload of a manifest entry, from this node's store or by hash from one of its holders.

        This node must host some stage, not necessarily that of the payload. `entry.holders` may name any
        peers of the allow list that could have the payload.

        Raises:
            HetnodeError: PAYLOAD_UNAVAILABLE when no holder sent the right bytes within `deadline` seconds;
                PAYLOAD_CORRUPT when its length exceeds the capacity of its stage; HIVEMIND_DIED.
        """

    async def fetch_checkpoint(self, download: CheckpointDownload, deadline: float) -> None:
        """Download one part of a checkpoint into a file, from several donors at the same time.

        Every chunk is verified before it is written, so on return the file has the digest of the record. A
        donor that sends wrong bytes is logged and not asked again. A donor that fails several times in a row
        is not asked again either. Right chunks that the file already has are not fetched, so a failed
        download continues with the next call.

        This node must host some stage, not necessarily that of the record.

        Raises:
            HetnodeError: STATE_UNAVAILABLE, with the reason of each donor, if the file is not complete within
                `deadline` seconds or no donor is left; DISK_FULL; HIVEMIND_DIED.
        """

    async def wait_closed(self) -> None:
        """Return when the transport has ended: after :meth:`close`, or after the death of a process."""

    async def close(self) -> None:
        """End the transport and all its processes. May be called again."""
