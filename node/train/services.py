"""The processes and connections that the training of a node uses."""

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
    """Processes and connections of a joined node.

    A move to other stages replaces worker, transport and directory.
    """

    identity: Identity
    worker: WorkerClient
    transport: Transport
    coordinator: CoordinatorClient
    links: Links
    membership: Membership
    directory: Directory
