"""``hetnode coordinator``: runs the coordinator of one training run."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from platformdirs import user_data_path
from rich.console import Console

from coordinator.ops.dashboard.port import forget_url, url_in
from node import command_runner
from node.cli.options import (
    MEGABIT,
    HiddenLifeline,
    Metrics,
    RelayPortRange,
    Verbose,
    network,
    option,
    panel,
    port_range,
    records_as_options,
    seconds_of,
)
from node.cli.spec import SpecOptions, pinned
from node.command_runner import bad_option
from node.extras import can_serve_dashboard, require_for_dashboard
from node.folder import make_usable
from node.ipc.template import own_template
from protocol.errors import ErrorCode, HetnodeError
from protocol.spec.run import RunSpec
from protocol.status import AlarmMode
from protocol.trust.host_port import host_port

if TYPE_CHECKING:
    from node.exchange.transport import ArbiterPeer
    from node.security.identity import Identity

log = logging.getLogger(__name__)

_DASHBOARD = "127.0.0.1:7780"

health = panel("Health of the training")
Listen = Annotated[str, network("HOST:PORT of the API. 0.0.0.0 accepts other machines, [::] also over IPv6.")]
EnrollmentPort = Annotated[
    int | None,
    network(
        "TCP port where invites are traded for certificates; 0 takes a free one. Default: the one after the "
        "API's.",
        "--enrolment-port",
        min=0,
        max=65535,
    ),
]
RelayListen = Annotated[
    str | None, network("HOST:PORT of the relay. Default: the port after that of enrollment.")
]
RelayUplink = Annotated[
    float,
    network(
        "Mb/s that this machine can send for all nodes behind the relay together. Plans divide it among "
        "them. Default: not known, and no bound.",
        min=0.0,
    ),
]
Alarm = Annotated[
    AlarmMode,
    health(
        "What happens if the training of most of the run looks unhealthy, for example if the loss jumps: "
        "pause the run until the operator resumes it or rolls it back, only warn, or off."
    ),
]
AlarmSigma = Annotated[
    float,
    health(
        "How unusual a figure must be, in robust standard deviations of the rounds before.", min=3, max=100
    ),
]
OnePort = Annotated[
    bool,
    network("Enrollment and relay share the API's port, for homes that let out port 443 only."),
]
Dashboard = Annotated[
    str | None,
    network(
        "HOST:PORT of the web dashboard; port 0 takes a free one. Beyond loopback its readers need a token: "
        "see 'hetnode dashboard'. Default: 127.0.0.1:7780, or the next free port."
    ),
]
NoDashboard = Annotated[bool, network("Serve no dashboard.", "--no-dashboard")]
Folder = Annotated[
    Path | None,
    option("Where the commit log, the run's authority and metrics are kept; the same folder resumes."),
]


@records_as_options()
def coordinator(
    options: SpecOptions,
    listen: Listen = "127.0.0.1:7700",
    advertise: Annotated[str | None, network("Host under which others reach this machine.")] = None,
    dht_port: Annotated[int, network("TCP port of the DHT bootstrap peer; 0 takes a free one.")] = 0,
    enrollment_port: EnrollmentPort = None,
    relay: Annotated[
        bool,
        network(
            "Carry connections to nodes that others cannot dial; see 'hetnode relay'.", "--relay/--no-relay"
        ),
    ] = True,
    relay_listen: RelayListen = None,
    one_port: OnePort = False,
    relay_ports: RelayPortRange = None,
    relay_uplink: RelayUplink = 0.0,
    certificate_life: Annotated[str, network("Life of a node's certificate; nodes renew theirs.")] = "24h",
    metrics: Metrics = None,
    dashboard: Dashboard = None,
    no_dashboard: NoDashboard = False,
    alarm: Alarm = AlarmMode.WARN,
    alarm_sigma: AlarmSigma = 6.0,
    folder: Folder = None,
    verbose: Verbose = False,
    lifeline: HiddenLifeline = None,
) -> None:
    """Run the coordinator of one training run: membership, placement, the commit log and the DHT's first
    peer.

    It waits until the peers that the run's shape asks for have joined, and ends when the run is finished.
    Tensors pass through it only where peers contest a payload, so a small machine is enough. Prints the
    command that makes an invite; nodes join with an invite alone.
    """
    command_runner.configure_logging(verbose)
    if folder is not None and not options.any_given and (folder / "run.toml").exists():
        options = SpecOptions(config=folder / "run.toml")  # resumes the run in the folder
    spec = pinned(options.spec(), options.config)
    host, _ = command_runner.split_address(listen, "--listen")
    advertise = command_runner.bare_host(advertise, "--advertise")
    given = {"--relay-listen": relay_listen, "--metrics": metrics, "--dashboard": dashboard}
    for name, address in given.items():
        if address is not None:
            command_runner.split_address(address, name)
    relay_range = port_range(relay_ports)
    if not relay and (relay_listen is not None or relay_range is not None or relay_uplink):
        raise bad_option(
            "--no-relay runs no relay, and other options say how it is to run.",
            "Leave out --relay-listen, --relay-ports and --relay-uplink, or --no-relay.",
        )
    if one_port and (enrollment_port is not None or relay_listen is not None or not relay):
        raise bad_option(
            "--one-port puts enrollment and the relay on the port of --listen.",
            "Leave out --enrolment-port, --relay-listen and --no-relay.",
        )
    life = seconds_of(certificate_life, "--certificate-life")
    if host in ("0.0.0.0", "::") and advertise is None:
        raise bad_option(
            f"--listen {listen} accepts other machines, but no host is given that they can reach.",
            "Give --advertise HOST, the name or address under which they reach this machine.",
        )
    folder = folder or user_data_path("hetnode") / "runs" / spec.name / "coordinator"
    make_usable(folder, mode=0o700)  # it holds the private keys of the authority and of the operator
    identity = _open_identity(folder)
    own_template()  # imports the transport while this process imports the coordinator

    from coordinator.api.public_ports import ListenAddresses, RelayOptions  # noqa: PLC0415
    from coordinator.app import prepare_process, run_coordinator  # noqa: PLC0415
    from coordinator.ops.health.alarm import AlarmOptions  # noqa: PLC0415
    from node.cli import finished  # noqa: PLC0415

    bootstrap = _BootstrapPeer(folder, identity, spec, host, dht_port, advertise or host)
    enrollment_address = None if enrollment_port is None else host_port(host, enrollment_port)
    own_relay = RelayOptions(relay_listen or "", relay_range, relay_uplink * MEGABIT) if relay else None
    addresses = ListenAddresses(
        listen, enrollment_address, advertise or host, own_relay, one_port, metrics, dht_port
    )
    addresses = replace(addresses, **_dashboard(dashboard, no_dashboard))
    announce = _CoordinatorFolder(folder, spec).announce
    prepare_process()
    running = run_coordinator(
        *(spec, folder, addresses, identity, bootstrap.start, announce, life),
        alarm=AlarmOptions(alarm, alarm_sigma),
    )
    if not command_runner.run(running, lifeline):
        Console(highlight=False, soft_wrap=True).print(finished.coordinator_text(folder), markup=False)


def _dashboard(given: str | None, none_wanted: bool) -> dict[str, Any]:
    """The fields of ListenAddresses for the dashboard: by default it is served where there is a port for it.

    Raises HetnodeError: BAD_OPTION; MISSING_EXTRA if one is asked for that this machine cannot serve.
    """
    if given is not None:
        if none_wanted:
            raise bad_option(
                "--no-dashboard serves none, and --dashboard says where.", "Leave out one of them."
            )
        require_for_dashboard()
        return {"dashboard": given}
    if none_wanted:
        return {}
    if not can_serve_dashboard():
        log.info("there is no dashboard: its libraries come with pip install 'hetnode[dashboard]'")
        return {}
    return {"dashboard": _DASHBOARD, "near_dashboard": True}


class _CoordinatorFolder:
    """The files by which others find the coordinator that runs in `folder`."""

    def __init__(self, folder: Path, spec: RunSpec) -> None:
        self._folder, self._spec = folder, spec
        address = folder / "address"
        self._former = address.read_text() if address.exists() else ""
        forget_url(folder)
        address.unlink(missing_ok=True)  # a process that waits for the address must get the new one

    def announce(self, run: str, address: str, enrollment: str) -> None:
        """Write the addresses on which the coordinator listens now, and print how to let nodes in."""
        folder, spec, console = self._folder, self._spec, Console(highlight=False)
        (folder / "run.toml").write_text(spec.toml)
        # Programs read this file by its name, so it keeps its spelling.
        for name, text in (("enrolment-address", enrollment), ("address", address)):
            (folder / f"{name}.tmp").write_text(text)
            (folder / f"{name}.tmp").replace(folder / name)
        console.print(f"run  {run}\nspec {spec.hash}")
        console.print(spec.model_dump_json(indent=2), markup=False)
        console.print(f"API {address}, enrollment {enrollment}", markup=False)
        if (url := url_in(folder)) is not None:
            console.print(f"dashboard {url}", markup=False)
        if self._former not in ("", address):
            console.print(f"[yellow]the peers of this run look for it at {self._former}[/]")
        console.print(f"let nodes in with: hetnode invite create --folder {folder}", markup=False)


@dataclass(frozen=True)
class _BootstrapPeer:
    """The first peer of the run's DHT, which the coordinator hosts. `port` 0 takes the port of last time."""

    folder: Path
    identity: Identity
    spec: RunSpec
    host: str
    port: int
    advertise: str

    async def start(self, run: str) -> ArbiterPeer:
        """Start it for `run`; it starts itself again on its port.

        Raises as :meth:`TransportPackage.start_arbiter` does.
        """
        # Nodes know where the DHT began, so a coordinator that is started again must use the same port.
        kept = self.folder / "dht-port"
        former = int(kept.read_text()) if kept.exists() else 0
        try:
            peer = await self._start_on(run, self.port or former)
        except HetnodeError as error:
            if error.code is not ErrorCode.PORT_IN_USE or self.port:
                raise
            peer = await self._start_on(run, 0)
        kept.write_text(str(peer.port))
        return peer

    async def _start_on(self, run: str, port: int) -> ArbiterPeer:
        from node.exchange.transport import Entry, transport_in_use  # noqa: PLC0415

        async def enter() -> Entry:
            return Entry(
                run,
                self.folder / "bootstrap.pem",
                self.folder / "authority.pem",
                listen_host=self.host,
                listen_port=port,
                advertise=self.advertise,
                sources=(),  # those of members come with their calls, and so do the members
                members=(),
            )

        contested = self.folder / "contested"
        return await transport_in_use().start_arbiter(self.identity, enter, self.spec, contested)


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
