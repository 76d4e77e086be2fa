"""``hetnode join``: takes part in a run with this machine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer
from platformdirs import user_data_path

from node import command_runner
from node.cli import known_runs
from node.cli.options import NETWORK, HiddenLifeline, Verbose
from node.folder import make_usable
from node.ipc.template import own_template
from node.measure.hardware import available_threads
from protocol.errors import ErrorCode, HetnodeError
from protocol.roles import DEFAULT_ROLE, POLICIES
from protocol.types import Role

_ROLES = " ".join(f"'{role}': {policy.summary}." for role, policy in POLICIES.items())

InviteOrRun = Annotated[
    str | None,
    typer.Argument(
        help="The invite; or the name of a run that this machine was in before.", metavar="INVITE|RUN"
    ),
]
RoleOption = Annotated[
    Role | None,
    typer.Option(help=f"{_ROLES} Default: that of the last time, or the invite's, or else {DEFAULT_ROLE}."),
]
InviteFile = Annotated[
    Path | None,
    typer.Option(
        help="File that holds the invite, '-' for standard input. Other users cannot see it in the list of "
        "processes."
    ),
]
Folder = Annotated[Path | None, typer.Option(help="Where this node keeps its checkpoint.")]
IdentityFile = Annotated[
    Path | None,
    typer.Option("--identity", help="Key file of this node. Default: the first that no live node uses."),
]
ExpectedConfig = Annotated[
    Path | None,
    typer.Option(help="Run file that you expect: the node is refused if the run has another spec."),
]
ExpectedSpec = Annotated[
    str, typer.Option(help="Spec hash that you expect: the node is refused if the run has another.")
]
OwnData = Annotated[
    str | None, typer.Option(help="Where this machine keeps the run's data, such as text:PATH.")
]
OwnTokenizer = Annotated[Path | None, typer.Option(help="Where this machine keeps the run's tokenizer.json.")]
Initial = Annotated[
    Path | None,
    typer.Option(help="Of a run that starts from an imported model: what 'hetnode import' has written."),
]
Device = Annotated[str, typer.Option(help="Torch device, such as cpu, cuda or cuda:1.")]
Compile = Annotated[
    bool, typer.Option("--compile", help="Use torch.compile: faster on a GPU, after a minute.")
]
ActivationCheckpointing = Annotated[
    bool,
    typer.Option(
        "--activation-checkpointing",
        help="Compute activations again in the backward pass: far less memory, a third more time.",
    ),
]
Threads = Annotated[int, typer.Option(help="CPU threads to compute with; 0 takes all.", min=0)]
Measure = Annotated[
    bool,
    typer.Option(
        help="Measure this machine's speed and its connections before it trains: the coordinator plans with "
        "the results. What the node learns while it trains is reported in any case."
    ),
]
Listen = Annotated[
    str,
    typer.Option(
        help="HOST:PORT on which neighbours reach this node; port 0 is free.", rich_help_panel=NETWORK
    ),
]
Advertise = Annotated[
    str | None,
    typer.Option(
        help="Host that neighbours are told. Default: this machine's address towards the coordinator.",
        rich_help_panel=NETWORK,
    ),
]
DhtPort = Annotated[
    int, typer.Option(help="TCP port of this node's DHT peer; 0 takes a free one.", rich_help_panel=NETWORK)
]
DialOnly = Annotated[
    bool,
    typer.Option(help="Accept no connections: every link is dialled from here.", rich_help_panel=NETWORK),
]
JoinSeconds = Annotated[
    float | None,
    typer.Option(
        help="How long to try to reach the coordinator. Default: 15 with an invite, 600 in a known run.",
        rich_help_panel=NETWORK,
    ),
]
DrainSeconds = Annotated[
    float,
    typer.Option(
        help="How long the node may take, once asked to end, to finish the round in which it trains. 0 saves "
        "the progress and ends at once.",
        min=0,
    ),
]


def join(
    run: InviteOrRun = None,
    role: RoleOption = None,
    invite_file: InviteFile = None,
    folder: Folder = None,
    identity: IdentityFile = None,
    config: ExpectedConfig = None,
    expect_spec: ExpectedSpec = "",
    data: OwnData = None,
    tokenizer: OwnTokenizer = None,
    initial: Initial = None,
    device: Device = "cpu",
    compile: Compile = False,
    activation_checkpointing: ActivationCheckpointing = False,
    threads: Threads = 0,
    measure: Measure = True,
    listen: Listen = "0.0.0.0:0",
    advertise: Advertise = None,
    dht_port: DhtPort = 0,
    dial_only: DialOnly = False,
    join_seconds: JoinSeconds = None,
    drain_seconds: DrainSeconds = 120.0,
    verbose: Verbose = False,
    lifeline: HiddenLifeline = None,
) -> None:
    """Take part in a run: train, exchange pseudo-gradients, and keep this node's part of the model.

    An invite is traded once for a certificate, which the node keeps and renews; afterwards the name of the
    run is enough. The node gets everything from the coordinator: the specification, its stages and its
    neighbours. It ends by itself when the run is finished. Ctrl-C lets it finish its round and leave in
    order, a second one saves the progress and leaves at once, a third one ends the process.
    """
    command_runner.configure_logging(verbose)
    if folder is not None:
        make_usable(folder)
    destination = known_runs.destination(run, invite_file)
    host, port = command_runner.split_address(listen, "--listen")
    _check_data(data)
    key = known_runs.identity_for(destination, identity)
    own_template()  # imports torch and hivemind while this process imports the rest

    from node.runtime import NodeOptions, run_node  # noqa: PLC0415

    options = NodeOptions(
        invite=destination.invite,
        run=destination.run,
        role=role,
        folder=make_usable(folder or user_data_path("hetnode") / "nodes" / key.peer),
        listen_host=host,
        listen_port=port,
        dht_port=dht_port,
        advertise=advertise,
        dial_only=dial_only,
        device=device,
        compile=compile,
        activation_checkpointing=activation_checkpointing,
        threads=threads or available_threads(),
        source=data,
        tokenizer=str(tokenizer) if tokenizer else None,
        initial=str(initial.absolute()) if initial else None,
        join_seconds=join_seconds,
        measure=measure,
        spec_hash=_spec_hash(config, initial, tokenizer) if config else expect_spec,
    )
    leaving = asyncio.Event()
    message = (
        f"asked to end: this node finishes its round first, in at most {drain_seconds:g} s; "
        "asked again, it leaves at once"
    )
    drain = command_runner.Drain(leaving.set, drain_seconds, message)
    command_runner.run(run_node(options, key, leaving), lifeline, drain)


def _check_data(source: str | None) -> None:
    """Raise DATA_UNREADABLE if `source` names a file or folder that does not exist."""
    kind, _, path = (source or "").partition(":")
    if kind in ("text", "jsonl") and not Path(path).exists():
        raise HetnodeError(
            ErrorCode.DATA_UNREADABLE, f"{path} does not exist.", "Give --data the place of the run's data."
        )


def _spec_hash(config: Path, initial: Path | None, tokenizer: Path | None) -> str:
    """The hash of the specification in the run file `config`."""
    from node.cli.spec import pinned  # noqa: PLC0415
    from protocol.spec.resolve import resolve  # noqa: PLC0415

    return pinned(resolve(file=config), config, initial, tokenizer=str(tokenizer) if tokenizer else None).hash
