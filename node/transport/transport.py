"""What a node needs of the network between the peers of a run, whatever library carries it.

:mod:`node.hive` implements it with hivemind. Another transport is one more package beside that one, and one
line in :mod:`node.runtime`.
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
        held: payloads that this peer has now and serves to others, in canonical order (by owner).
        rejected: payloads that an honest peer would not have announced or sent.
    """

    held: tuple[PayloadDescriptor, ...]
    rejected: tuple[Rejection, ...] = ()


@dataclass(frozen=True)
class CheckpointDownload:
    """One part of a checkpoint, and where to get it.

    Attributes:
        record: of the part, as signed by the coordinator.
        donors: the peers to ask, and for each a stage that it hosts.
        nbytes: of the part, from the spec (protocol.algorithm.digest.size_of): more is never taken.
        header: of the part (protocol.algorithm.digest.header_of).
        into: the file; its folder is made where it does not exist.
    """

    record: StateRecord
    donors: Mapping[PeerId, int]
    nbytes: int
    header: str
    into: Path


class Transport(Protocol):
    """Peer records, payloads and checkpoints between this node and the other peers of its run.

    Every call has a deadline, and every failure arrives as a HetnodeError. When the transport's own processes
    die, every open and every later call raises HIVEMIND_DIED, and the node has to be started again.
    """

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses under which other peers reach this one; empty where it only dials."""

    async def host_stages(
        self, capacities: Mapping[int, int], payload_folder: Path, checkpoint_folder: Path, keep_rounds: int
    ) -> None:
        """Begin to exchange and serve payloads of these stages, and to serve checkpoints. Call it once.

        Args:
            capacities: the largest payload of each hosted stage, in bytes. Larger ones are refused unread.
            payload_folder: payloads are kept here, also over a restart; made where it does not exist. Two
                nodes must not share it.
            checkpoint_folder: this node's checkpoints (node.checkpoint.parts). The parts that it holds at the
                time of a request are served. It need not exist yet.
            keep_rounds: payloads of rounds older than this many before the newest are dropped.

        Raises:
            HetnodeError: HIVEMIND_DIED. A disk that takes no payloads is no failure: they are then held in
                memory for a while, with a warning in the log.
        """

    async def admit(self, peers: Collection[PeerId], banned: Collection[PeerId] = ()) -> None:
        """Replace the allow list, which is empty at first.

        Args:
            peers: the peers of the plan: they may exchange payloads and fetch payloads and checkpoints.
            banned: refused everywhere, certified or not. All other certified peers may use the records.

        Raises:
            HetnodeError: DHT_UNREACHABLE, HIVEMIND_DIED.
        """

    async def publish(self, record: PeerRecord, ttl: float) -> None:
        """Sign `record` and let other peers find it for `ttl` seconds.

        Raises:
            HetnodeError: DHT_UNREACHABLE when no peer took it; HIVEMIND_DIED.
        """

    async def lookup(self) -> dict[PeerId, PeerRecord]:
        """The records of this run that can be found now, each signed by its own certified peer.

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
            descriptor: of `payload`, with its length and hash; signed by this peer. Its stage must be hosted.
            group: as matched by the coordinator; None lets the transport find the group by itself.
            expected: size of the full group; only used without `group`.
            deadline: seconds from now. A payload that has not arrived by then is not in the result.

        Returns:
            the payloads that this peer holds, its own included, and those that it refused. A failed exchange
            is a normal event: then it holds its own payload alone.

        Raises:
            HetnodeError: HIVEMIND_DIED.
        """

    async def fetch_payload(self, entry: ManifestEntry, deadline: float) -> bytes:
        """The payload of a manifest entry: held already, or fetched by hash from one of its holders.

        The stage of the payload need not be hosted here, but some stage must be. `entry.holders` may name
        any peers of the allow list that could have it; a holder that still keeps the round can serve it.

        Raises:
            HetnodeError: PAYLOAD_UNAVAILABLE when no holder sent the right bytes within `deadline` seconds;
                PAYLOAD_CORRUPT when its length exceeds the capacity of its stage; HIVEMIND_DIED.
        """

    async def fetch_checkpoint(self, download: CheckpointDownload, deadline: float) -> None:
        """Get one part of a checkpoint into a file, from several donors at the same time.

        Every chunk is verified before it is written, so on return the file is the part whose digest is that
        of the record. A donor that sends wrong bytes is named in the log and not asked again; a donor that
        fails several times in a row is given up. Right chunks that the file holds already are not asked for,
        so a download that has failed continues when it is called again.

        Some stage must be hosted here; it need not be that of the record.

        Raises:
            HetnodeError: STATE_UNAVAILABLE when the file is not complete within `deadline` seconds, or no
                donor is left before, with the reason of each donor; DISK_FULL; HIVEMIND_DIED.
        """

    async def wait_closed(self) -> None:
        """Return when the transport has ended, by :meth:`close` or by the death of one of its processes."""

    async def close(self) -> None:
        """End the transport and everything that it has started. May be called again."""
