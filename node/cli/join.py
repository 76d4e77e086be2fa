"""``hetnode join``: takes part in a run with this machine."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from platformdirs import user_data_path
from rich.console import Console

from node import command_runner
from node.cli.consent import Consent
from node.cli.options import (
    MEGABIT,
    Metrics,
    PublicName,
    Threads,
    chosen_name,
    guest,
    network,
    option,
    records_as_options,
)
from node.cli.output import open_log_of_service
from node.cli.run_page import published
from node.command_runner import TerminalConsole, bad_option
from node.folder import make_usable
from node.here import known_runs
from node.here.known_runs import Destination
from node.home.guest.guest import Guest, GuestRule
from node.hosts import command as hosts
from node.hosts.launch import Launch
from node.ipc.ranks import OneWorker, Workers, names_several, one_device, parse_devices
from node.ipc.template import own_template
from node.ipc.worker_calls import AUTO_DEVICE, Precision
from node.measure.hardware import available_threads
from node.security import credentials
from protocol.roles import POLICIES, RoleWish
from protocol.server.line import LineLimits
from protocol.types import PeerId

if TYPE_CHECKING:
    from node.monitoring.figures import NodeFigures
    from node.monitoring.report import NodeReport
    from node.options import NodeOptions

_ROLES = " ".join(f"'{role}': {policy.summary}." for role, policy in POLICIES.items() if policy.trains)


@dataclass(frozen=True)
class JoinOptions:
    """The run to join, and what this machine chooses for its node (node.options.NodeOptions)."""

    run: Annotated[
        str | None,
        typer.Argument(
            help="The invite; the name of a run that this machine was in before; or https://HOST/ or the "
            "domain of a run's page.",
            metavar="INVITE|RUN|URL",
        ),
    ] = None
    role: Annotated[
        RoleWish | None,
        option(
            f"'auto': the coordinator chooses by what this machine measures, and may change it between two "
            f"rounds. The others bind. {_ROLES} Default: that of the last time, or the invite's, or auto."
        ),
    ] = None
    invite_file: Annotated[
        Path | None,
        option(
            "File that holds the invite, '-' for standard input. Other users cannot see it in the list "
            "of processes."
        ),
    ] = None
    folder: Annotated[Path | None, option("Where this node keeps its checkpoint.")] = None
    identity: Annotated[
        Path | None, option("Key file of this node. Default: the first that no live node uses.")
    ] = None
    expect_spec: Annotated[
        str, option("Run file or spec hash that you expect: the node is refused if the run has another spec.")
    ] = ""
    data: Annotated[
        list[str] | None,
        option(
            "Where this machine keeps the run's data, such as text:PATH, or NAME=text:PATH of a mixture; may "
            "be repeated. 'any': every path that the operator names.",
            metavar="[NAME=]SOURCE|any",
        ),
    ] = None
    tokenizer: Annotated[Path | None, option("Where this machine keeps the run's tokenizer file.")] = None
    initial: Annotated[
        Path | None, option("Of a run that starts from an imported model: what 'hetnode import' has written.")
    ] = None
    name: PublicName = None
    yes: Annotated[
        bool,
        option(
            "Take part without a question. Else a person at a terminal is asked once for each run, and told "
            "what the run would do on this machine.",
            "--yes",
        ),
    ] = False
    device: Annotated[
        str,
        option(
            "Torch device, such as cpu, cuda, cuda:1, also as 1, or mps. 'auto': the best one here. Several "
            "devices of a full replica, with --role replica: 'all' GPUs, numbers of GPUs such as 0,1,2,3, or "
            "cpu:N for N processes on the CPU. With --role stage each of them gets a node."
        ),
    ] = AUTO_DEVICE
    sharded: Annotated[
        bool | None,
        option(
            "With several devices or torchrun: shard the parameters over the devices, or keep all on each. "
            "Default: shard where they do not fit.",
            "--sharded/--replicated",
        ),
    ] = None
    precision: Annotated[
        Precision, option("Of matrix products. 'auto': bf16 on a GPU that computes in it, else fp32.")
    ] = Precision.AUTO
    compile: Annotated[bool, option("Use torch.compile: faster on a GPU, after a minute.", "--compile")] = (
        False
    )
    activation_checkpointing: Annotated[
        bool,
        option(
            "Compute activations again in the backward pass: far less memory, a third more time.",
            "--activation-checkpointing",
        ),
    ] = False
    threads: Threads = 0
    measure: Annotated[
        bool,
        option(
            "Measure this machine's speed and its connections before it trains: the coordinator plans "
            "with the results. What the node learns while it trains is reported in any case."
        ),
    ] = True
    listen: Annotated[
        str,
        network(
            "HOST:PORT on which neighbours reach this node; port 0 is free. 'none' accepts no connections: "
            "every link is dialled from here."
        ),
    ] = "[::]:0"
    advertise: Annotated[
        str | None,
        network("Host that neighbours are told. Default: this machine's address towards the coordinator."),
    ] = None
    dht_port: Annotated[int, network("TCP port of this node's DHT peer; 0 takes a free one.")] = 0
    relay: Annotated[
        str,
        network(
            "How others reach this node if they cannot dial it: 'auto' takes the nearest relay of the run, "
            "HOST:PORT one of them, 'none' only dials."
        ),
    ] = "auto"
    port_mapping: Annotated[
        bool,
        network(
            "Ask the router of a home, by UPnP or NAT-PMP, to forward both ports to this node. Not done with "
            "--advertise."
        ),
    ] = True
    metrics: Metrics = None
    join_seconds: Annotated[
        float | None,
        network("How many seconds to wait for a coordinator that does not answer. Default: without end."),
    ] = None
    hours: Annotated[
        str,
        guest(
            "Hours of the day, local time, in which the node takes part, such as 22:00-07:00 or "
            "22:00-07:00,12:00-13:30. Default: always."
        ),
    ] = ""
    idle_only: Annotated[
        bool,
        guest(
            "Take part only while no one uses this machine's keyboard, and no other process its GPU or CPU, "
            "as far as that can be known.",
            "--idle-only",
        ),
    ] = False
    upload_limit: Annotated[
        float,
        guest("Mb/s that this node sends at most, in links, payloads and checkpoints. 0: no limit.", min=0),
    ] = 0.0
    download_limit: Annotated[float, guest("Mb/s that it receives at most, likewise.", min=0)] = 0.0
    memory_limit: Annotated[
        float,
        guest(
            "GB of the device's memory that this node uses at most: it gets only stages that fit. 0: no "
            "limit.",
            min=0,
        ),
    ] = 0.0
    drain_seconds: Annotated[
        float,
        option(
            "How long the node may take, once asked to end, to finish the round in which it trains. 0 "
            "saves the progress and ends at once.",
            min=0,
        ),
    ] = 120.0


@records_as_options()
def join(chosen: JoinOptions) -> None:
    """Take part in a run: train, exchange pseudo-gradients, and keep this node's part of the model.

    An invite is traded once for a certificate, which the node keeps and renews; afterwards the name of the
    run is enough. The node gets everything from the coordinator: the specification, its stages and its
    neighbours. It ends by itself when the run is finished. Ctrl-C lets it finish its round and leave in
    order, a second one saves the progress and leaves at once, a third one ends the process.
    A closed terminal does not end it: 'hetnode leave' does.
    """
    console = open_log_of_service()
    chosen = replace(chosen, device=one_device(chosen.device))
    if chosen.folder:
        make_usable(chosen.folder)
    launch = hosts.launch_for(chosen.role, names_several(chosen.device))
    if chosen.role is RoleWish.STAGE and names_several(chosen.device) and launch is None:
        from node.cli.several import join_each  # noqa: PLC0415

        raise typer.Exit(join_each(vars(chosen)))
    _check_options(chosen, launch)
    if launch and not launch.leads:
        hosts.follow_leader(launch, chosen.device, chosen.threads, vars(chosen))
        return
    leader = hosts.leader_for(launch, chosen.device, chosen.sharded, vars(chosen)) if launch else None
    found = None if chosen.invite_file else published(chosen.run)
    destination = found or known_runs.destination(chosen.run, chosen.invite_file)
    rules = _rules(chosen)
    key = known_runs.identity_for(destination, chosen.identity)
    from node.cli import finished  # noqa: PLC0415

    if text := finished.text_for(destination, key.path):
        TerminalConsole(highlight=False, soft_wrap=True).print(text, markup=False)
        if leader:
            command_runner.run(hosts.dismiss_followers(leader))
        return
    own_template()  # imports torch and the transport while this process imports the rest

    from node.process import run_node  # noqa: PLC0415

    options = _node_options(chosen, destination, key.peer, leader or _workers(chosen, launch))
    consent = Consent(options.folder, options.own_data, chosen.yes)
    options = replace(options, ask=consent.ask)
    leaving, allowed = asyncio.Event(), Guest(options.folder, rules, chosen.drain_seconds)
    if destination.invite and credentials.of_authority(key.path, destination.invite.pin) is None:
        allowed.resume()  # a pause is of the run in which it was made
    drain = _drain(leaving, chosen.drain_seconds)
    main = partial(run_node, options, key, leaving, allowed)
    node = _shown(hosts.led(leader, main) if leader else main, console, allowed, consent)
    if command_runner.run(node, drain) is None:
        raise command_runner.Interrupted


def _node_options(chosen: JoinOptions, run: Destination, peer: PeerId, workers: Workers) -> NodeOptions:
    from node.options import NodeOptions  # noqa: PLC0415
    from node.security.owner import owner_file  # noqa: PLC0415

    host, port = command_runner.split_address(_listen(chosen), "--listen")
    return NodeOptions(
        invite=run.invite,
        run=run.run,
        role=chosen.role,
        name=chosen_name(chosen.name),
        owner=owner_file(),
        folder=make_usable(chosen.folder or user_data_path("hetnode") / "nodes" / peer),
        listen_host=host,
        listen_port=port,
        dht_port=chosen.dht_port,
        advertise=command_runner.bare_host(chosen.advertise, "--advertise"),
        dial_only=chosen.listen == "none",
        port_mapping=chosen.port_mapping,
        relay=chosen.relay,
        device=AUTO_DEVICE if names_several(chosen.device) else chosen.device,
        workers=workers,
        precision=chosen.precision,
        compile=chosen.compile,
        activation_checkpointing=chosen.activation_checkpointing,
        threads=chosen.threads or available_threads(),
        own_data=tuple(chosen.data or ()),
        tokenizer=str(chosen.tokenizer) if chosen.tokenizer else None,
        initial=str(chosen.initial.absolute()) if chosen.initial else None,
        join_seconds=chosen.join_seconds,
        metrics=chosen.metrics,
        measure=chosen.measure,
        memory_limit=round(chosen.memory_limit * 1e9),
        line=LineLimits(chosen.upload_limit * MEGABIT, chosen.download_limit * MEGABIT),
        spec_hash=_expected_spec(chosen),
    )


def _listen(chosen: JoinOptions) -> str:
    return "[::]:0" if chosen.listen == "none" else chosen.listen


async def _shown(
    main: Callable[[NodeFigures], Awaitable[Path | None]],
    console: Console | None,
    allowed: Guest,
    consent: Consent,
) -> Path | None:
    """Run `main`; on a terminal with a line below its log that says what the node does."""
    from node.monitoring.figures import NodeFigures  # noqa: PLC0415

    figures = NodeFigures()
    if console is None:
        return await main(figures)
    from node.monitoring.report import report_of  # noqa: PLC0415
    from node.views.live_line import LiveLine  # noqa: PLC0415

    def look() -> tuple[NodeReport, str]:
        reason = "" if allowed.rest is None or allowed.is_here else allowed.rest.reason
        return report_of(figures), reason

    async with LiveLine(console, look) as line:
        consent.quiet = line.paused
        return await main(figures)


def _drain(leaving: asyncio.Event, seconds: float) -> command_runner.Draining:
    message = (
        f"asked to end: this node finishes its round first, in at most {seconds:g} s; "
        "asked again, it leaves at once"
    )
    return command_runner.Draining(leaving.set, seconds, message)


def _check_options(chosen: JoinOptions, launch: Launch | None) -> None:
    """Raise an error that names the option whose value cannot be used."""
    _workers(chosen, launch)
    command_runner.split_address(_listen(chosen), "--listen")
    command_runner.bare_host(chosen.advertise, "--advertise")
    _check_data(chosen.data or ())
    if chosen.relay not in ("auto", "none"):
        command_runner.split_address(chosen.relay, "--relay")
    if chosen.metrics is not None:
        command_runner.split_address(chosen.metrics, "--metrics")


def _rules(chosen: JoinOptions) -> tuple[GuestRule, ...]:
    """When the node has to rest, beside the pauses by hand. Raises BAD_OPTION."""
    from node.home.guest import presence  # noqa: PLC0415
    from node.home.guest.hours import HoursRule, parse_hours  # noqa: PLC0415
    from node.home.guest.idle import IdleRule  # noqa: PLC0415

    rules: list[GuestRule] = []
    if chosen.hours:
        rules.append(HoursRule(parse_hours(chosen.hours), chosen.drain_seconds))
    if chosen.idle_only:
        rules.append(IdleRule(presence.look, time.monotonic))
    return tuple(rules)


def _check_data(own: Sequence[str]) -> None:
    from node.data.own import check_own  # noqa: PLC0415

    check_own(own)


def _workers(chosen: JoinOptions, launch: Launch | None) -> Workers:
    """Where a node computes that leads no other hosts. Raises BAD_OPTION."""
    if not names_several(chosen.device):
        if chosen.sharded is None or launch:
            return OneWorker()
        raise bad_option(
            "--sharded and --replicated are for several devices.",
            "Name them with --device, or start with torchrun.",
        )
    if chosen.role is not RoleWish.REPLICA:
        raise bad_option(
            "Several devices are for full replicas: a member of a pipeline computes on one.",
            "Give --role replica with them, or --role stage: then a node for each of them is started.",
        )
    return replace(parse_devices(chosen.device), sharded=chosen.sharded)


def _expected_spec(chosen: JoinOptions) -> str:
    """The hash of the specification that the run must have; "" accepts any."""
    if not chosen.expect_spec or re.fullmatch("[0-9a-f]{64}", chosen.expect_spec):
        return chosen.expect_spec
    from node.data.tokenizer import pinned  # noqa: PLC0415
    from protocol.run_files.resolve import resolve  # noqa: PLC0415

    file, tokenizer = Path(chosen.expect_spec), str(chosen.tokenizer) if chosen.tokenizer else None
    return pinned(resolve(file=file), file, chosen.initial, tokenizer=tokenizer).hash
