"""The run, and the processes and connections that the training of a node uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from node.exchange.transport import Transport
from node.ipc.worker_calls import Comparison
from node.ipc.worker_client import WorkerClient
from node.monitoring.figures import NodeFigures
from node.net.coordinator_client import CoordinatorClient
from node.net.directory import Directory
from node.net.link_server import LinkServer
from node.net.membership import Membership
from node.net.peer_address import Through, directly
from node.security.identity import Identity
from protocol.spec.run import RunSpec
from protocol.types import Committed, PayloadDescriptor

Compare = Callable[[Committed, Sequence[PayloadDescriptor]], Comparison | None]
"""From a decision, and the payloads without a weight that follow those of the decision."""


@dataclass(frozen=True)
class Services:
    """The run of a joined node, its processes and its connections.

    `through` gives the address to dial instead of that of another peer. Training keeps `figures` up to date.
    `compare` chooses what this member measures of the payloads of a round; None: nothing.

    A move to other stages replaces worker, transport and directory.
    """

    run: str
    spec: RunSpec
    identity: Identity
    worker: WorkerClient
    transport: Transport
    coordinator: CoordinatorClient
    link_server: LinkServer
    membership: Membership
    directory: Directory
    through: Through = directly
    figures: NodeFigures = field(default_factory=NodeFigures)
    compare: Compare | None = None
