"""``hetnode coordinator``: runs the coordinator of one training run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from platformdirs import user_data_path
from rich.console import Console

from node import command_runner
from node.cli.options import NETWORK, HiddenLifeline, Verbose, seconds_of
from node.cli.spec import (
    Config,
    Data,
    LinkK,
    Pipelines,
    Preset,
    Replicas,
    Rounds,
    Seed,
    Stages,
    Steps,
    Tokenizer,
    pinned,
    spec_of,
)
from node.folder import make_usable
from node.ipc.template import own_template
from protocol.errors import ErrorCode, HetnodeError
from protocol.spec.run import RunSpec

if TYPE_CHECKING:
    from node.hive.transport import HivemindTransport
    from node.security.identity import Identity

Listen = Annotated[
    str, typer.Option(help="HOST:PORT of the API. 0.0.0.0 accepts other machines.", rich_help_panel=NETWORK)
]
Advertise = Annotated[
    str | None, typer.Option(help="Host under which others reach this machine.", rich_help_panel=NETWORK)
]
DhtPort = Annotated[
    int,
    typer.Option(help="TCP port of the DHT bootstrap peer; 0 takes a free one.", rich_help_panel=NETWORK),
]
EnrollmentPort = Annotated[
    int | None,
    typer.Option(
        "--enrolment-port",
        help="TCP port where invites are traded for certificates; 0 takes a free one. Default: the one after "
        "the API's.",
        rich_help_panel=NETWORK,
        min=0,
        max=65535,
    ),
]
CertificateLife = Annotated[
    str, typer.Option(help="Life of a node's certificate; nodes renew theirs.", rich_help_panel=NETWORK)
]
Folder = Annotated[
    Path | None,
    typer.Option(
        help="Where the commit log, the run's authority and metrics are kept; the same folder resumes."
    ),
]


def coordinator(
    preset: Preset = None,
    config: Config = None,
    data: Data = None,
    tokenizer: Tokenizer = None,
    rounds: Rounds = None,
    inner_steps: Steps = None,
    replicas: Replicas = None,
    pipelines: Pipelines = None,
    stages: Stages = None,
    k: LinkK = None,
    seed: Seed = None,
    listen: Listen = "127.0.0.1:7700",
    advertise: Advertise = None,
    dht_port: DhtPort = 0,
    enrollment_port: EnrollmentPort = None,
    certificate_life: CertificateLife = "24h",
    folder: Folder = None,
    verbose: Verbose = False,
    lifeline: HiddenLifeline = None,
) -> None:
    """Run the coordinator of one training run: membership, placement, the commit log and the DHT's first
    peer.

    It waits until the peers that the run's shape asks for have joined, and ends when the run is finished.
    Tensors never pass through it, so a small machine is enough. Prints the command that makes an invite;
    nodes join with an invite alone.
    """
    command_runner.configure_logging(verbose)
    overrides = {
        "data": data,
        "tokenizer": tokenizer,
        "rounds": rounds,
        "steps": inner_steps,
        "replicas": replicas,
        "pipelines": pipelines,
        "stages": stages,
        "k": k,
        "seed": seed,
    }
    given = [preset, config, *overrides.values()]
    if folder is not None and all(option is None for option in given) and (folder / "run.toml").exists():
        config = folder / "run.toml"  # resumes the run in the folder
    spec = pinned(spec_of(config, preset, **overrides), config)
    host, _ = command_runner.split_address(listen, "--listen")
    life = seconds_of(certificate_life, "--certificate-life")
    folder = folder or user_data_path("hetnode") / "runs" / spec.run_id / "coordinator"
    make_usable(folder, mode=0o700)  # it holds the private keys of the authority and of the operator
    if host in ("0.0.0.0", "::") and advertise is None:
        raise command_runner.bad_option(
            f"--listen {listen} accepts other machines, but no host is given that they can reach.",
            "Give --advertise HOST, the name or address under which they reach this machine.",
        )
    identity = _open_identity(folder)
    own_template()  # imports hivemind while this process imports the coordinator

    from coordinator.app import ListenAddresses, run_coordinator  # noqa: PLC0415

    bootstrap = _BootstrapPeer(folder, identity, spec.run_id, host, dht_port, advertise or host)
    enrollment_address = None if enrollment_port is None else f"{host}:{enrollment_port}"
    addresses = ListenAddresses(listen, enrollment_address, advertise or host)
    announce = _CoordinatorFolder(folder, spec).announce
    running = run_coordinator(spec, folder, addresses, identity, bootstrap.start, announce, life)
    command_runner.run(running, lifeline)


class _CoordinatorFolder:
    """The files by which others find the coordinator that runs in `folder`."""

    def __init__(self, folder: Path, spec: RunSpec) -> None:
        self._folder, self._spec = folder, spec
        address = folder / "address"
        self._former = address.read_text() if address.exists() else ""
        address.unlink(missing_ok=True)  # a process that waits for the address must get the new one

    def announce(self, address: str, enrollment: str) -> None:
        """Write the addresses on which the coordinator listens now, and print how to let nodes in."""
        folder, spec, console = self._folder, self._spec, Console(highlight=False)
        (folder / "run.toml").write_text(spec.toml)
        # Programs read this file by its name, so it keeps its spelling.
        for name, text in (("enrolment-address", enrollment), ("address", address)):
            (folder / f"{name}.tmp").write_text(text)
            (folder / f"{name}.tmp").replace(folder / name)
        console.print(f"run  {spec.run_id}\nspec {spec.hash}")
        console.print(spec.model_dump_json(indent=2), markup=False)
        console.print(f"API {address}, enrollment {enrollment}", markup=False)
        if self._former not in ("", address):
            console.print(f"[yellow]the peers of this run look for it at {self._former}[/]")
        console.print(f"let nodes in with: hetnode invite create --folder {folder}", markup=False)


@dataclass(frozen=True)
class _BootstrapPeer:
    """The first peer of the run's DHT, which the coordinator hosts. `port` 0 takes the port of last time."""

    folder: Path
    identity: Identity
    run: str
    host: str
    port: int
    advertise: str

    async def start(self) -> HivemindTransport:
        """Start it. Raises as :meth:`HivemindTransport.start` does."""
        # Nodes know where the DHT began, so a coordinator that is started again must use the same port.
        kept = self.folder / "dht-port"
        former = int(kept.read_text()) if kept.exists() else 0
        try:
            hivemind = await self._start_on(self.port or former)
        except HetnodeError as error:
            if error.code is not ErrorCode.PORT_IN_USE or self.port:
                raise
            hivemind = await self._start_on(0)
        kept.write_text(hivemind.addresses[0].split("/tcp/")[1].split("/")[0])
        return hivemind

    async def _start_on(self, port: int) -> HivemindTransport:
        from node.hive.transport import HivemindTransport  # noqa: PLC0415

        return await HivemindTransport.start(
            identity=self.identity,
            certificate=self.folder / "bootstrap.pem",
            authority=self.folder / "authority.pem",
            run=self.run,
            initial_peers=(),
            listen_host=self.host,
            listen_port=port,
            advertise=self.advertise,
        )


def _open_identity(folder: Path) -> Identity:
    """The key of the coordinator in `folder`. Raises RUN_FOLDER_IN_USE while another coordinator has it."""
    from node.security.identity import open_identity  # noqa: PLC0415

    try:
        return open_identity(folder / "identity.key")
    except HetnodeError as error:
        if error.code is not ErrorCode.ALREADY_ACTIVE:
            raise
        raise HetnodeError(
            ErrorCode.RUN_FOLDER_IN_USE,
            f"Another coordinator runs in the folder {folder}.",
            "Stop it, or give this one another --folder.",
        ) from None
