"""``hetnode coordinator``: runs the coordinator of one training run."""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Annotated, Any

from platformdirs import user_data_path

from coordinator.api.dashboard import USUAL_ADDRESS, command_for, forget_url, url_in
from coordinator.ops.tracking.tools import Tool
from coordinator.ops.tracking.tracking import Tracking
from coordinator.store.log_copy import kept_spec
from node import command_runner
from node.cli.bootstrap_peer import BootstrapPeer
from node.cli.coordinator_key import open_coordinator_key, warn_of_other_files
from node.cli.options import (
    MEGABIT,
    Metrics,
    RelayPortRange,
    network,
    option,
    panel,
    port_range,
    records_as_options,
    seconds_of,
)
from node.cli.output import open_log_of_service
from node.cli.spec import SpecOptions
from node.cli.standby import MARKER, StandbyFolder, address_of, follow_run, term_at
from node.command_runner import TerminalConsole, bad_option
from node.extras import Extra, can_serve_dashboard, require, require_for_dashboard, require_tool
from node.folder import make_usable
from node.ipc.template import own_template
from node.security.credentials import load_operator
from protocol.run_files.resolve import to_toml
from protocol.spec.run import RunSpec
from protocol.status import AlarmMode
from protocol.trust.host_port import host_port, split_host_port
from protocol.trust.invite import open_invite
from protocol.trust.private_file import write_whole

if TYPE_CHECKING:
    from coordinator.api.public_ports import ListenAddresses
    from coordinator.membership.open_places import OpenTerms

log = logging.getLogger(__name__)

_LISTEN = "127.0.0.1:7700"
_PLACES = "places.json"
"""In the folder of a coordinator: the options that say where it listens, with the ports that it had."""

health = panel("Health of the training")
open_run = panel("Peers without an invite")


@dataclass(frozen=True)
class CoordinatorOptions:
    """How the coordinator is reached, where it keeps the run, and what it does about alarms."""

    listen: Annotated[
        str | None,
        network(
            "HOST:PORT of the API. 0.0.0.0 accepts other machines, [::] also over IPv6. Default: all places "
            "that the run in --folder had the last time, else 127.0.0.1:7700."
        ),
    ] = None
    advertise: Annotated[str | None, network("Host under which others reach this machine.")] = None
    dht_port: Annotated[int, network("TCP port of the DHT bootstrap peer; 0 takes a free one.")] = 0
    enrollment_port: Annotated[
        int | None,
        network(
            "TCP port where invites are traded for certificates; 0 takes a free one. Default: the one after "
            "the API's.",
            "--enrolment-port",
            min=0,
            max=65535,
        ),
    ] = None
    relay: Annotated[
        str,
        network(
            "HOST:PORT at which to carry connections to nodes that others cannot dial, see 'hetnode relay'; "
            "'none' carries none. 'auto': the port after that of enrollment."
        ),
    ] = "auto"
    one_port: Annotated[
        bool, network("Enrollment and relay share the API's port, for homes that let out port 443 only.")
    ] = False
    relay_ports: RelayPortRange = None
    relay_uplink: Annotated[
        float,
        network(
            "Mb/s that this machine can send for all nodes behind the relay together. Plans divide it among "
            "them. Default: not known, and no bound.",
            min=0.0,
        ),
    ] = 0.0
    open: Annotated[
        bool,
        open_run(
            "Anyone may join without an invite, with what this command prints. The payloads of such a peer "
            "count as soon as three replicas of members with invites have found them good for some rounds.",
            "--open",
        ),
    ] = False
    open_members: Annotated[
        int, open_run("Peers without an invite that take part at once; others wait for their turn.", min=1)
    ] = 64
    open_joins: Annotated[
        int, open_run("Such peers that come from one address, or IPv6 /64, in an hour.", min=1)
    ] = 8
    certificate_life: Annotated[str, network("Life of a node's certificate; nodes renew theirs.")] = "24h"
    metrics: Metrics = None
    track: Annotated[
        Tool | None,
        option("Send the figures of metrics.jsonl to this tool, of which the extra is installed."),
    ] = None
    dashboard: Annotated[
        str | None,
        network(
            "HOST:PORT of the web dashboard; port 0 takes a free one, 'none' serves none. Beyond loopback "
            "readers need a token: see 'hetnode status --dashboard'. Default: 127.0.0.1:7780, or the next "
            "free port."
        ),
    ] = None
    contact: Annotated[
        str,
        open_run(
            "How to ask you for an invite, such as an address. With it, or --open, everyone who reaches the "
            "dashboard finds the run: 'hetnode join https://HOST/'."
        ),
    ] = ""
    objects: Annotated[
        str,
        network(
            "s3://BUCKET/PREFIX of an object store: members also exchange through it, by signed URLs. "
            "The usual environment and files of boto3 have credentials and endpoint. Needs the extra s3."
        ),
    ] = ""
    alarm: Annotated[
        AlarmMode,
        health(
            "What happens if the training of most of the run looks unhealthy, for example if the loss jumps: "
            "pause the run until the operator resumes it or rolls it back, only warn, or off."
        ),
    ] = AlarmMode.WARN
    standby: Annotated[
        bool,
        network(
            "Coordinate nothing yet: follow the coordinator of which --folder is a backup, and copy what it "
            "stores before its nodes learn of it. --listen and --advertise are those of this machine.",
            "--standby",
        ),
    ] = False
    take_over: Annotated[
        bool,
        network(
            "Go on with the run in --folder, a standby's, in the place of a coordinator that does not answer "
            "any more.",
            "--take-over",
        ),
    ] = False
    folder: Annotated[
        Path | None,
        option("Where the commit log, the run's authority and metrics are kept; the same folder resumes."),
    ] = None

    def terms(self, spec: RunSpec) -> OpenTerms:
        """For peers without an invite. Raises BAD_OPTION, also for a run that can leave out no payload."""
        from coordinator.membership.open_places import CLOSED, OpenTerms  # noqa: PLC0415

        usual = CoordinatorOptions()
        if not self.open and (self.open_members, self.open_joins) != (usual.open_members, usual.open_joins):
            raise bad_option("--open-members and --open-joins need --open.", "Give --open, too.")
        if self.open and spec.outer.exchange != "gathered":
            raise bad_option(
                f"This run cannot be open: outer.exchange = '{spec.outer.exchange}' leaves out no payload.",
                "Leave out --open, or make a run with outer.exchange = 'gathered'.",
            )
        return OpenTerms(self.open_members, self.open_joins) if self.open else CLOSED

    @property
    def host(self) -> str:
        return command_runner.split_address(self.listen or _LISTEN, "--listen")[0]

    def as_before(self, folder: Path) -> CoordinatorOptions:
        """These options; without --listen, what they leave out is as it was in `folder` the last time."""
        if self.listen is not None or not (places := folder / _PLACES).exists():
            return self
        usual, known = vars(CoordinatorOptions()), dict[str, Any]()
        with suppress(ValueError, AttributeError):  # a crash has left half of the file
            known = {name: each for name, each in json.loads(places.read_text()).items() if name in usual}
        return replace(
            self, **{name: each for name, each in known.items() if vars(self)[name] == usual[name]}
        )

    def places(self, address: str, enrollment: str) -> str:
        """JSON for :meth:`as_before`, of a coordinator that is reached at `address` and `enrollment`."""
        ports = [split_host_port(each)[1] for each in (address, enrollment)]
        kept = {
            name: getattr(self, name)
            for name in ("advertise", "relay", "relay_ports", "dashboard", "contact", "objects")
        }
        own = {"one_port": self.one_port, "enrollment_port": None if self.one_port else ports[1]}
        return json.dumps({"listen": host_port(self.host, ports[0]), **kept, **own})

    @property
    def planned_places(self) -> str:
        """As :meth:`places`, of a standby: its ports are known before it listens."""
        port = command_runner.split_address(self.listen or _LISTEN, "--listen")[1]
        ports = port, self.enrollment_port or port + 1
        return self.places(*(host_port(self.host, each) for each in ports))

    def addresses(self) -> ListenAddresses:
        """Where the coordinator shall listen. Raises BAD_ADDRESS, BAD_OPTION, MISSING_EXTRA."""
        from coordinator.api.public_ports import ListenAddresses, RelayOptions  # noqa: PLC0415

        host, advertise = self.host, command_runner.bare_host(self.advertise, "--advertise")
        for name, address, words in (
            ("--relay", self.relay, ("auto", "none")),
            ("--metrics", self.metrics, (None,)),
            ("--dashboard", self.dashboard, (None, "none")),
        ):
            if address is not None and address not in words:
                command_runner.split_address(address, name)
        if self.objects:
            require("boto3", Extra.S3)
        ports = port_range(self.relay_ports)
        if self.relay == "none" and (ports is not None or self.relay_uplink):
            raise bad_option(
                "--relay none runs no relay, and other options say how it is to run.",
                "Leave out --relay-ports and --relay-uplink, or --relay none.",
            )
        if self.one_port and (self.enrollment_port is not None or self.relay != "auto"):
            raise bad_option(
                "--one-port puts enrollment and the relay on the port of --listen.",
                "Leave out --enrolment-port and --relay.",
            )
        if host in ("0.0.0.0", "::") and advertise is None:
            raise bad_option(
                f"--listen {self.listen} accepts other machines, but no host is given that they can reach.",
                "Give --advertise HOST, the name or address under which they reach this machine.",
            )
        relay = RelayOptions("" if self.relay == "auto" else self.relay, ports, self.relay_uplink * MEGABIT)
        return ListenAddresses(
            self.listen or _LISTEN,
            None if self.enrollment_port is None else host_port(host, self.enrollment_port),
            advertise or host,
            None if self.relay == "none" else relay,
            self.one_port,
            self.metrics,
            self.dht_port,
            **_dashboard(self.dashboard),
            contact=self.contact,
            objects=self.objects,
        )


@records_as_options()
def coordinator(options: SpecOptions, chosen: CoordinatorOptions) -> None:
    """Run the coordinator of one training run: membership, placement, the commit log and the DHT's first
    peer.

    It waits until the peers that the run's shape asks for have joined, and ends when the run is finished.
    Tensors pass through it only where peers contest a payload, so a small machine is enough. Prints the
    command that makes an invite; nodes join with an invite alone.
    """
    from node.data.tokenizer import pinned  # noqa: PLC0415

    open_log_of_service()
    folder = chosen.folder
    kept = None if folder is None or options.any_given else kept_spec(folder)
    if folder is not None and kept is not None:
        options = SpecOptions(config=folder / "run.toml")  # resumes the run in the folder
    spec = pinned(kept or options.spec(), options.config)
    terms = chosen.terms(spec)
    folder = folder or user_data_path("hetnode") / "runs" / spec.name / "coordinator"
    listens = chosen.listen is not None
    chosen = chosen.as_before(folder)
    if chosen.track:
        require_tool(chosen.track.value)
    addresses, life = chosen.addresses(), seconds_of(chosen.certificate_life, "--certificate-life")
    standby = StandbyFolder(folder, address_of(addresses.api, addresses.advertise))
    standby.check(chosen.standby, chosen.take_over, listens)
    warn_of_other_files(folder)
    make_usable(folder, mode=0o700)  # it holds the private keys of the authority and of the operator
    identity = open_coordinator_key(folder)
    takes_over = chosen.take_over and not standby.has_decided  # a service may say so at each start
    if chosen.standby or takes_over:
        standby.make_own()
    if chosen.standby:
        write_whole(folder / _PLACES, chosen.planned_places)
        follow_run(standby, spec, identity)
        return
    own_template()  # imports the transport while this process imports the coordinator

    from coordinator.api.succession import Partner  # noqa: PLC0415
    from coordinator.app import run_coordinator  # noqa: PLC0415
    from coordinator.store.restore import once_there_is_space  # noqa: PLC0415
    from node.cli import finished  # noqa: PLC0415
    from protocol.server.busy_process import prepare_process  # noqa: PLC0415

    advertise = addresses.advertise or chosen.host
    bootstrap = BootstrapPeer(folder, identity, spec, chosen.host, chosen.dht_port, advertise)
    tracking = Tracking(folder, chosen.track)
    announce = _CoordinatorFolder(folder, spec, chosen, tracking).announce
    prepare_process()
    given = spec, folder, addresses, identity, bootstrap.start, announce, life
    partner = Partner(folder, term_at(folder), takes_over)
    start = partial(run_coordinator, *given, alarm=chosen.alarm, terms=terms, partner=partner)
    running = once_there_is_space(start)
    with tracking:
        was_served = command_runner.run(running)
    text = f"its pages again: {command_for(folder)}" if was_served else finished.coordinator_text(folder)
    TerminalConsole(highlight=False, soft_wrap=True).print(text, markup=False)


def _dashboard(given: str | None) -> dict[str, Any]:
    """The fields of ListenAddresses for the dashboard: by default it is served where there is a port for it.

    Raises HetnodeError MISSING_EXTRA if one is asked for that this machine cannot serve.
    """
    if given == "none":
        return {}
    if given is not None:
        require_for_dashboard()
        return {"dashboard": given}
    if not can_serve_dashboard():
        log.info("there is no dashboard: its libraries come with pip install 'hetnode[dashboard]'")
        return {}
    return {"dashboard": USUAL_ADDRESS, "near_dashboard": True}


class _CoordinatorFolder:
    """The files by which others find the coordinator that runs in `folder`."""

    def __init__(self, folder: Path, spec: RunSpec, chosen: CoordinatorOptions, tracking: Tracking) -> None:
        self._folder, self._spec, self._chosen, self._tracking = folder, spec, chosen, tracking
        address = folder / "address"
        self._former = address.read_text() if address.exists() else ""
        forget_url(folder)
        address.unlink(missing_ok=True)  # a process that waits for the address must get the new one

    def announce(self, run: str, address: str, enrollment: str) -> None:
        """Write the addresses on which the coordinator listens now, and print how to let nodes in."""
        from coordinator.api.public_ports import warn_of_unreached  # noqa: PLC0415

        self._tracking.start(run)
        folder, spec, console = self._folder, self._spec, TerminalConsole(highlight=False)
        write_whole(folder / "run.toml", to_toml(spec))
        # Programs read this file by its name, so it keeps its spelling.
        write_whole(folder / _PLACES, self._chosen.places(address, enrollment))
        (folder / MARKER).unlink(missing_ok=True)
        write_whole(folder / "enrolment-address", enrollment)
        write_whole(folder / "address", address)
        console.print(f"run  {run}\nspec {spec.hash}: {folder / 'run.toml'}", markup=False, soft_wrap=True)
        console.print(f"API {address}, enrollment {enrollment}", markup=False)
        # As a thread, and no task: it may wait for a resolver, and nobody waits for it.
        Thread(target=warn_of_unreached, args=({address, enrollment},), daemon=True).start()
        if (url := url_in(folder)) is not None:
            console.print(f"dashboard {url}", markup=False)
        if self._chosen.take_over:
            console.print(
                "nodes come here by themselves; make new invites, or move the name of the former host"
            )
        elif self._former not in ("", address):
            console.print(
                f"[yellow]it was at {self._former}: nodes that train there find it in some minutes, if they "
                "still reach its DHT peer; send the others a new invite, or start it there again[/]"
            )
        console.print(
            f"let nodes in with: hetnode invite create --folder {folder}", markup=False, soft_wrap=True
        )
        if self._chosen.open:
            invite = open_invite(address, enrollment, load_operator(folder)[1].pin).encode()
            console.print(f"anyone may come with: hetnode join {invite}", markup=False, soft_wrap=True)
