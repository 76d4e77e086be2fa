"""What a node chooses for itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from node.ipc.ranks import OneWorker, Workers
from node.ipc.worker_calls import ComputeOptions, Precision
from node.net.joining import Ask
from protocol.roles import RoleWish
from protocol.server.line import LineLimits
from protocol.trust.invite import Invite


@dataclass(frozen=True)
class NodeOptions:
    """What a node chooses for itself; nothing here is part of the run's spec. See node.cli.join.JoinOptions.

    With `invite`, the node enrols first; otherwise it has credentials for `run` from before. `role` None
    takes the last choice, or the role of the invite, or else the coordinator chooses. `name` is public; None
    takes the last choice, "" is none. `advertise` None takes the address that this machine uses towards the
    coordinator. `relay` is a choice of node.net.reach. `workers` of several ranks have devices of their own,
    in place of `device`. `own_data` (node/data/own.py) and `tokenizer` override where this node reads data
    and tokenizer.json. `metrics` is ``host:port``; None serves none. `ask` tells the owner of a run that is
    new here (node.net.joining.Agreement). `owner` may have the phrase of whose this node is
    (node.security.owner). `pieces` of a microbatch are computed one after the other.
    """

    invite: Invite | None
    run: str
    role: RoleWish | None
    folder: Path
    listen_host: str = "::"
    listen_port: int = 0
    dht_port: int = 0
    advertise: str | None = None
    dial_only: bool = False
    port_mapping: bool = True
    relay: str = "auto"
    device: str = "cpu"
    workers: Workers = OneWorker()  # noqa: RUF009  frozen
    precision: Precision = Precision.AUTO
    compile: bool = False
    activation_checkpointing: bool = False
    threads: int = 1
    own_data: tuple[str, ...] = ()
    tokenizer: str | None = None
    initial: str | None = None
    spec_hash: str = ""
    join_seconds: float | None = None
    metrics: str | None = None
    measure: bool = False
    memory_limit: int = 0
    line: LineLimits = field(default_factory=LineLimits)
    name: str | None = None
    owner: Path | None = None
    ask: Ask | None = None
    pieces: int = 1

    @property
    def compute(self) -> ComputeOptions:
        return ComputeOptions(
            self.device,
            self.compile,
            self.activation_checkpointing,
            self.memory_limit,
            self.precision,
            self.workers.sharded,
            self.pieces,
        )

    @property
    def initial_folder(self) -> Path | None:
        """The checkpoint of the parameters before round 1."""
        return None if self.initial is None else Path(self.initial)
