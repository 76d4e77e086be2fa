"""The command ``hetnode``: which commands there are, and where each is defined.

A command's module is imported when the command runs, so that ``hetnode --help`` and the small commands do not
wait for imports of the large ones. Heavy imports of a command are inside its function for the same reason.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from protocol.errors import ExitCode


@dataclass(frozen=True)
class LazyCommand:
    """A command or a family of commands: `attribute` of the module is a function or a typer application.

    `module` is in node.cli; `help` is the first sentence of its own help.
    """

    module: str
    attribute: str
    help: str

    def load(self, name: str) -> Any:
        """The command as typer runs it."""
        found = getattr(import_module(f"node.cli.{self.module}"), self.attribute)
        if isinstance(found, typer.Typer):
            group = typer.main.get_group(found)
            group.name = name
            return group
        single = typer.Typer(add_completion=False, rich_markup_mode="rich")
        single.command(name)(found)
        return typer.main.get_command(single)


COMMANDS = {
    "doctor": LazyCommand(
        "doctor",
        "doctor",
        "Check and measure this machine: device, memory, disk, clock, connections and speed, with a remedy "
        "each.",
    ),
    "generate": LazyCommand(
        "model", "generate", "Continue a text with the model of a run, to see what it has learned."
    ),
    "eval": LazyCommand(
        "model", "evaluate", "Measure how well a model predicts text: loss, perplexity, bits per byte."
    ),
    "export": LazyCommand(
        "model", "export", "Write the model of a run as a folder that transformers loads without remote code."
    ),
    "import": LazyCommand(
        "model",
        "import_model",
        "Start a run from an existing model: writes a run file and the parameters with which it begins.",
    ),
    "leave": LazyCommand(
        "own_node", "leave", "Let this machine's node leave its run in order, and wait until it has."
    ),
    "pause": LazyCommand(
        "own_node", "pause", "Let this machine's node leave its run for now, and wait until it has."
    ),
    "resume": LazyCommand(
        "own_node", "resume", "Let a node take part again that 'hetnode pause' has paused."
    ),
    "service": LazyCommand(
        "service", "service_app", "A node that this machine keeps running, also after a restart."
    ),
    "coordinator": LazyCommand(
        "coordinator",
        "coordinator",
        "Run the coordinator of one training run: membership, placement, the commit log and the DHT's first "
        "peer.",
    ),
    "join": LazyCommand(
        "join",
        "join",
        "Take part in a run: train, exchange pseudo-gradients, and keep this node's part of the model.",
    ),
    "relay": LazyCommand(
        "relay",
        "relay",
        "Carry connections to nodes that others cannot dial, such as those in homes behind a router.",
    ),
    "health": LazyCommand("health", "health", "Say whether a node or a coordinator of this machine is well."),
    "status": LazyCommand(
        "status", "status", "Show what a run is doing, who takes part, and how the loss goes."
    ),
    "credit": LazyCommand(
        "credit", "credit", "Show what each peer has contributed: stage tokens, stage rounds and bytes."
    ),
    "watch": LazyCommand(
        "watch", "watch", "Watch a run and this machine's node live in the terminal; '?' shows the keys."
    ),
    "explain": LazyCommand(
        "explain", "explain", "Say why a round was slow, why a peer does not train, or what would be faster."
    ),
    "swarm": LazyCommand("swarm", "swarm_app", "A whole swarm of real processes on this machine."),
    "spec": LazyCommand("spec", "spec_app", "Run specifications."),
    "run": LazyCommand("operator", "run_app", "A whole run, by its operator: pause it, and let it go on."),
    "rollback": LazyCommand(
        "operator",
        "rollback",
        "Let a run go back to the model after a former round. It is paused then, until 'hetnode run resume'.",
    ),
    "invite": LazyCommand("operator", "invite_app", "Invites: who may come into a run."),
    "peers": LazyCommand("operator", "peers_app", "Peers that were let in or are kept out."),
    "incident": LazyCommand("incident", "incident_app", "Event logs of runs as files that can be shared."),
    "receipt": LazyCommand(
        "receipt", "receipt_app", "Receipts: what a peer has done for a run, signed by its coordinator."
    ),
    "plan": LazyCommand(
        "plan",
        "plan",
        "What a swarm would do before any peer joins: pipelines, tokens per second, traffic, bottleneck.",
    ),
    "experiment": LazyCommand(
        "experiment",
        "experiment_app",
        "Train all replicas of a run on this machine, to compare algorithms. No network takes part.",
    ),
}


class LazyGroup(TyperGroup):
    """Lists commands by their help alone, and imports the one that is run."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = COMMANDS.get(cmd_name)
        return command and TyperCommand(cmd_name, help=command.help)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        from node.cli.removed import refuse_removed  # noqa: PLC0415  asyncio: the help needs none of it

        name, *rest = args
        refuse_removed(args)
        if name in COMMANDS:
            return name, COMMANDS[name].load(name), rest
        return super().resolve_command(ctx, args)  # says that there is no such command


app = typer.Typer(
    cls=LazyGroup,
    name="hetnode",
    help="Pre-train one language model together, from home GPUs and datacenters alike.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Let the command log details.")] = False,
) -> None:
    if verbose:
        from node.command_runner import VERBOSE  # noqa: PLC0415

        os.environ[VERBOSE] = "1"  # also for the processes that the command starts
    if version:
        from importlib.metadata import version as installed  # noqa: PLC0415

        from protocol.types import PROTOCOL_VERSION  # noqa: PLC0415

        typer.echo(f"hetnode {installed('hetnode')} (protocol {PROTOCOL_VERSION})")
        raise typer.Exit


def main() -> None:
    """Entry point: runs the command and turns every expected failure into one message and an exit code.

    Wrong usage (exit 2) is typer's to report.
    """
    # Only the template forks, and it has no gRPC channel: gRPC's fork handlers would only print warnings.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
    # gRPC would write a line for each stranger whose handshake fails; our own log says what matters.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    # pydantic would look for plugins in the metadata of every installed package.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    try:
        app(prog_name="hetnode")
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)
    except (Exception, BaseExceptionGroup) as error:
        from node.command_runner import exit_code_after  # noqa: PLC0415

        sys.exit(exit_code_after(error))


if __name__ == "__main__":
    main()
