"""The command ``hetnode``: every face of the project, one function per command."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from platformdirs import user_data_path
from rich.console import Console

from node import command_runner
from node.cli import known_runs
from node.cli.admin import invite_app, peers_app, seconds_of
from node.cli.doctor import doctor
from node.cli.experiment import experiment_app
from node.cli.leave import leave
from node.cli.model import checkpoint_app, evaluate, export, generate, import_model
from node.cli.plan import plan_app
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
    spec_app,
    spec_of,
)
from node.cli.swarm import swarm_app
from node.folder import usable
from node.measure import hardware
from protocol.errors import ErrorCode, ExitCode, HetnodeError, first_error
from protocol.roles import DEFAULT_ROLE, POLICIES
from protocol.spec.resolve import resolve
from protocol.types import PROTOCOL_VERSION, Role

ROLES_HELP = " ".join(f"'{role}': {policy.summary}." for role, policy in POLICIES.items())

app = typer.Typer(
    name="hetnode",
    help="Pre-train one language model together, from home GPUs and datacenters alike.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.add_typer(swarm_app, name="swarm")
app.add_typer(spec_app, name="spec")
app.add_typer(checkpoint_app, name="checkpoint")
app.add_typer(invite_app, name="invite")
app.add_typer(peers_app, name="peers")
app.add_typer(plan_app, name="plan")
app.add_typer(experiment_app, name="experiment")
app.command()(doctor)
app.command()(generate)
app.command("eval")(evaluate)
app.command()(export)
app.command("import")(import_model)
app.command()(leave)

_NETWORK = "Network"

Lifeline = Annotated[int | None, typer.Option(hidden=True)]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log details.")]


@app.command()
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
    listen: Annotated[
        str,
        typer.Option(help="HOST:PORT of the API. 0.0.0.0 accepts other machines.", rich_help_panel=_NETWORK),
    ] = "127.0.0.1:7700",
    advertise: Annotated[
        str | None,
        typer.Option(help="Host under which others reach this machine.", rich_help_panel=_NETWORK),
    ] = None,
    dht_port: Annotated[
        int,
        typer.Option(
            help="TCP port of the DHT bootstrap peer; 0 takes a free one.", rich_help_panel=_NETWORK
        ),
    ] = 0,
    enrolment_port: Annotated[
        int | None,
        typer.Option(
            help="TCP port where invites are traded for certificates; 0 takes a free one. "
            "Default: the one after the API's.",
            rich_help_panel=_NETWORK,
            min=0,
            max=65535,
        ),
    ] = None,
    certificate_life: Annotated[
        str, typer.Option(help="Life of a node's certificate; nodes renew theirs.", rich_help_panel=_NETWORK)
    ] = "24h",
    folder: Annotated[
        Path | None,
        typer.Option(
            help="Where the commit log, the run's authority and metrics are kept; the same folder resumes."
        ),
    ] = None,
    verbose: Verbose = False,
    lifeline: Lifeline = None,
) -> None:
    """Run the coordinator of one training run: membership, grouping, the commit log and the DHT's first peer.

    It waits until the peers that the run's shape asks for have joined, and ends when the run is finished.
    Tensors never pass through it, so a small machine will do. Prints the command that makes an invite; nodes
    join with an invite alone.
    """
    from coordinator.app import ListenAddresses, run_coordinator  # noqa: PLC0415
    from node.hive.transport import HivemindTransport  # noqa: PLC0415
    from node.security.identity import open_identity  # noqa: PLC0415

    command_runner.configure_logging(verbose)
    given = (preset, config, data, tokenizer, rounds, inner_steps, replicas, pipelines, stages, k, seed)
    if folder is not None and all(option is None for option in given) and (folder / "run.toml").exists():
        config = folder / "run.toml"  # goes on with the run that it holds
    spec = pinned(
        spec_of(
            config,
            preset,
            data=data,
            tokenizer=tokenizer,
            rounds=rounds,
            steps=inner_steps,
            replicas=replicas,
            pipelines=pipelines,
            stages=stages,
            k=k,
            seed=seed,
        ),
        config,
    )
    host, _ = command_runner.split_address(listen, "--listen")
    life = seconds_of(certificate_life, "--certificate-life")
    folder = folder or user_data_path("hetnode") / "runs" / spec.run_id / "coordinator"
    usable(folder, mode=0o700)  # the authority and the operator's key live here
    if host in ("0.0.0.0", "::") and advertise is None:
        raise command_runner.bad_option(
            f"--listen {listen} accepts other machines, but which host shall they be told?",
            "Give --advertise HOST, the name or address under which they reach this machine.",
        )
    public = advertise or host
    console = Console()
    try:
        identity = open_identity(folder / "identity.key")
    except HetnodeError as error:
        if error.code is not ErrorCode.ALREADY_ACTIVE:
            raise
        raise HetnodeError(
            ErrorCode.RUN_FOLDER_IN_USE,
            f"Another coordinator runs in the folder {folder}.",
            "Stop it, or give this one another --folder.",
        ) from None

    async def start_bootstrap() -> HivemindTransport:
        async def start(port: int) -> HivemindTransport:
            return await HivemindTransport.start(
                identity=identity,
                certificate=folder / "bootstrap.pem",
                authority=folder / "authority.pem",
                run=spec.run_id,
                initial_peers=(),
                listen_host=host,
                listen_port=port,
                advertise=public,
            )

        # Nodes know where the DHT began: a coordinator that comes back must be found there again.
        kept = folder / "dht-port"
        former = int(kept.read_text()) if kept.exists() else 0
        try:
            hivemind = await start(dht_port or former)
        except HetnodeError as error:
            if error.code is not ErrorCode.PORT_IN_USE or dht_port:
                raise
            hivemind = await start(0)
        kept.write_text(hivemind.addresses[0].split("/tcp/")[1].split("/")[0])
        return hivemind

    def ready(address: str, enrolment: str) -> None:
        (folder / "run.toml").write_text(spec.toml)
        for name, text in (("enrolment-address", enrolment), ("address", address)):
            (folder / f"{name}.tmp").write_text(text)
            (folder / f"{name}.tmp").replace(folder / name)
        console.print(f"run  {spec.run_id}\nspec {spec.hash}", highlight=False)
        console.print(spec.model_dump_json(indent=2), highlight=False, markup=False)
        console.print(f"API {address}, enrolment {enrolment}", highlight=False, markup=False)
        if former not in ("", address):
            console.print(f"[yellow]the peers of this run look for it at {former}[/]", highlight=False)
        create = f"hetnode invite create --folder {folder}"
        console.print(f"let nodes in with: {create}", highlight=False, markup=False)

    former = (folder / "address").read_text() if (folder / "address").exists() else ""
    (folder / "address").unlink(missing_ok=True)  # whoever waits for it wants the new one
    enrolment_door = None if enrolment_port is None else f"{host}:{enrolment_port}"
    command_runner.run(
        run_coordinator(
            spec,
            folder,
            ListenAddresses(listen, enrolment_door, public),
            identity,
            start_bootstrap,
            ready,
            life,
        ),
        lifeline,
    )


@app.command()
def join(
    run: Annotated[
        str | None,
        typer.Argument(
            help="The invite; or the name of a run that this machine was in before.", metavar="INVITE|RUN"
        ),
    ] = None,
    role: Annotated[
        Role | None,
        typer.Option(
            help=f"{ROLES_HELP} Default: that of the last time, or the invite's, or else {DEFAULT_ROLE}."
        ),
    ] = None,
    invite_file: Annotated[
        Path | None,
        typer.Option(
            help="File that holds the invite, '-' for standard input: keeps it out of sight of others."
        ),
    ] = None,
    folder: Annotated[Path | None, typer.Option(help="Where this node keeps its checkpoint.")] = None,
    identity: Annotated[
        Path | None, typer.Option(help="Key file of this node. Default: the first that no live node uses.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="Run file that you expect: the node is refused if the run has another spec."),
    ] = None,
    expect_spec: Annotated[
        str, typer.Option(help="Spec hash that you expect: the node is refused if the run has another.")
    ] = "",
    data: Annotated[
        str | None, typer.Option(help="Where this machine keeps the run's data, such as text:PATH.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Where this machine keeps the run's tokenizer.json.")
    ] = None,
    initial: Annotated[
        Path | None,
        typer.Option(help="Of a run that starts from an imported model: what 'hetnode import' has written."),
    ] = None,
    device: Annotated[str, typer.Option(help="Torch device, such as cpu, cuda or cuda:1.")] = "cpu",
    compile: Annotated[
        bool, typer.Option("--compile", help="Use torch.compile: faster on a GPU, after a minute.")
    ] = False,
    activation_checkpointing: Annotated[
        bool,
        typer.Option(
            "--activation-checkpointing",
            help="Compute activations again in the backward pass: far less memory, a third more time.",
        ),
    ] = False,
    threads: Annotated[int, typer.Option(help="CPU threads to compute with; 0 takes all.", min=0)] = 0,
    measure: Annotated[
        bool,
        typer.Option(
            help="Measure this machine's speed and its connections before it trains: the run is planned by "
            "that. What training itself shows is told in any case."
        ),
    ] = True,
    listen: Annotated[
        str,
        typer.Option(
            help="HOST:PORT on which neighbours reach this node; port 0 is free.", rich_help_panel=_NETWORK
        ),
    ] = "0.0.0.0:0",
    advertise: Annotated[
        str | None,
        typer.Option(
            help="Host that neighbours are told. Default: this machine's address towards the coordinator.",
            rich_help_panel=_NETWORK,
        ),
    ] = None,
    dht_port: Annotated[
        int,
        typer.Option(help="TCP port of this node's DHT peer; 0 takes a free one.", rich_help_panel=_NETWORK),
    ] = 0,
    dial_only: Annotated[
        bool,
        typer.Option(
            help="Accept no connections: every link is dialled from here.", rich_help_panel=_NETWORK
        ),
    ] = False,
    join_seconds: Annotated[
        float | None,
        typer.Option(
            help="How long to try to reach the coordinator. Default: 15 with an invite, 600 in a known run.",
            rich_help_panel=_NETWORK,
        ),
    ] = None,
    drain_seconds: Annotated[
        float,
        typer.Option(
            help="How long it may take, once asked to end, to finish the round in which it trains. "
            "0 keeps what there is and ends at once.",
            min=0,
        ),
    ] = 120.0,
    verbose: Verbose = False,
    lifeline: Lifeline = None,
) -> None:
    """Take part in a run: train, exchange pseudo-gradients, and keep this node's part of the model.

    An invite is traded once for a certificate, which the node keeps and renews; afterwards the name of the
    run is enough. The node gets everything from the coordinator: the specification, its stages and its
    neighbours. It ends by itself when the run is finished. Ctrl-C lets it finish its round and leave in
    order, a second one keeps what there is and leaves at once, a third one ends it as it is.
    """
    from node.runtime import NodeOptions, run_node  # noqa: PLC0415

    command_runner.configure_logging(verbose)
    if folder is not None:
        usable(folder)
    wanted = known_runs.destination(run, invite_file)
    host, port = command_runner.split_address(listen, "--listen")
    kind, _, path = (data or "").partition(":")
    if kind in ("text", "jsonl") and not Path(path).exists():
        raise HetnodeError(
            ErrorCode.DATA_UNREADABLE,
            f"There is nothing at {path}.",
            "Give --data the place of the run's data.",
        )
    own = known_runs.identity_for(wanted, identity)
    own_tokenizer = str(tokenizer) if tokenizer else None
    options = NodeOptions(
        invite=wanted.invite,
        run=wanted.run,
        role=role,
        folder=usable(folder or user_data_path("hetnode") / "nodes" / own.peer),
        listen_host=host,
        listen_port=port,
        dht_port=dht_port,
        advertise=advertise,
        dial_only=dial_only,
        device=device,
        compile=compile,
        activation_checkpointing=activation_checkpointing,
        threads=threads or hardware.available_threads(),
        source=data,
        tokenizer=own_tokenizer,
        initial=str(initial.absolute()) if initial else None,
        join_seconds=join_seconds,
        measure=measure,
        spec_hash=pinned(resolve(file=config), config, initial, tokenizer=own_tokenizer).hash
        if config
        else expect_spec,
    )
    leaving = asyncio.Event()
    words = (
        f"asked to end: this node finishes its round first, in at most {drain_seconds:g} s; "
        "asked again, it leaves at once"
    )
    drain = command_runner.Drain(leaving.set, drain_seconds, words)
    command_runner.run(run_node(options, own, leaving), lifeline, drain)


@app.command()
def status(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN|FOLDER",
            help="A run that this machine is or was in, or the folder of its coordinator or of 'swarm up'. "
            "Default: the only coordinator here.",
        ),
    ] = None,
) -> None:
    """Show what a run is doing, who takes part, and how the loss goes."""
    from node.net.coordinator_client import fetch_status  # noqa: PLC0415
    from node.views.status import status_view  # noqa: PLC0415

    address, shown = known_runs.operator_or_member(run)
    Console().print(status_view(command_runner.run(fetch_status(address, shown))))


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
) -> None:
    if version:
        from importlib.metadata import version as installed  # noqa: PLC0415

        typer.echo(f"hetnode {installed('hetnode')} (protocol {PROTOCOL_VERSION})")
        raise typer.Exit


def main() -> None:
    """Entry point: runs the command and turns every expected failure into one message and an exit code.

    Wrong usage (exit 2) is typer's to report.
    """
    # Children are spawned by fork and exec; gRPC's handlers for a bare fork would only print warnings.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
    # Its library would write a line for every stranger whose handshake fails; what matters is in our own log.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        app()
    except (command_runner.Interrupted, KeyboardInterrupt):
        sys.exit(ExitCode.INTERRUPTED)
    except (HetnodeError, BaseExceptionGroup) as error:
        cause = first_error(error)
        if not isinstance(cause, HetnodeError):
            raise
        command_runner.show_error(cause)
        sys.exit(cause.code.exit_code)


if __name__ == "__main__":
    main()
