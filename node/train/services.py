"""What a node's training works with: its identity, its processes, its connections, and this machine's own."""

from __future__ import annotations

from dataclasses import dataclass

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
    """How this machine computes and where it finds what the spec names: None means as the spec says.

    `initial` is the checkpoint of the parameters before round 1, where the run starts from given ones. In
    `search_paths`, or above them, a tokenizer.json is looked for that is not where the spec says.
    """

    device: str
    source: str | None
    tokenizer: str | None
    initial: str | None = None
    search_paths: tuple[str, ...] = ()
    compile: bool = False
    activation_checkpointing: bool = False
