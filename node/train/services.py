"""What a node's training works with: its identity, its processes, its connections, and this machine's own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from node.ipc.worker_calls import ComputeOptions
from node.ipc.worker_client import WorkerClient
from node.net.coordinator_client import CoordinatorClient
from node.net.directory import Directory
from node.net.link_dialer import Links
from node.net.membership import Membership
from node.security.identity import Identity
from node.transport.transport import Transport


@dataclass(frozen=True)
class Services:
    """What a joined node has at hand. Worker, transport and directory are started anew for other stages."""

    identity: Identity
    worker: WorkerClient
    transport: Transport
    coordinator: CoordinatorClient
    links: Links
    membership: Membership
    directory: Directory


@dataclass(frozen=True)
class LocalData:
    """How this machine computes, and where it finds what the spec names; None: as the spec says.

    Attributes:
        source: of the training data.
        tokenizer: its file.
        initial: the checkpoint of the parameters before round 1, where the run starts from given ones.
        search_paths: folders in which, or above which, tokenizer.json is looked for.
    """

    compute: ComputeOptions
    source: str | None = None
    tokenizer: str | None = None
    initial: Path | None = None
    search_paths: tuple[Path, ...] = ()
