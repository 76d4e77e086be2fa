"""The command ``hetnode``: which commands there are, and where each is defined.

A command's module is imported when the command runs, so that ``hetnode --help`` and the small commands do not
wait for imports of the large ones. Heavy imports of a command are inside its function for the same reason.
"""

from __future__ import annotations

import ast
import os
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from node.cli.output import open_output
from protocol.errors import ExitCode


@dataclass(frozen=True)
class LazyCommand:
    """A command or a family of commands: `attribute` of the module is a function or a typer application.

    `module` is in node.cli.
    """

    module: str
    attribute: str

    @property
    def help(self) -> str:
        """The first paragraph of its help, from the text of the module, which is not imported."""
        for node in ast.parse(Path(__file__).with_name(f"{self.module}.py").read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name == self.attribute:
                return " ".join((ast.get_docstring(node) or "").partition("\n\n")[0].split())
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == self.attribute:
                assert isinstance(node.value, ast.Call)
                named = {each.arg: each.value for each in node.value.keywords}
                return str(ast.literal_eval(named["help"]))
        raise AssertionError(f"node.cli.{self.module} has no {self.attribute}")

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
    "doctor": LazyCommand("doctor", "doctor"),
    "generate": LazyCommand("model", "generate"),
    "eval": LazyCommand("model", "evaluate"),
    "export": LazyCommand("model", "export"),
    "import": LazyCommand("model", "import_model"),
    "leave": LazyCommand("own_node", "leave"),
    "pause": LazyCommand("own_node", "pause"),
    "resume": LazyCommand("own_node", "resume"),
    "service": LazyCommand("service", "service_app"),
    "coordinator": LazyCommand("coordinator", "coordinator"),
    "join": LazyCommand("join", "join"),
    "relay": LazyCommand("relay", "relay"),
    "health": LazyCommand("health", "health"),
    "status": LazyCommand("status", "status"),
    "credit": LazyCommand("credit", "credit"),
    "watch": LazyCommand("watch", "watch"),
    "explain": LazyCommand("explain", "explain"),
    "swarm": LazyCommand("swarm", "swarm_app"),
    "spec": LazyCommand("spec", "spec_app"),
    "run": LazyCommand("operator", "run_app"),
    "rollback": LazyCommand("operator", "rollback"),
    "invite": LazyCommand("operator", "invite_app"),
    "peers": LazyCommand("operator", "peers_app"),
    "incident": LazyCommand("incident", "incident_app"),
    "receipt": LazyCommand("receipt", "receipt_app"),
    "plan": LazyCommand("plan", "plan"),
    "experiment": LazyCommand("experiment", "experiment_app"),
}
"""In the order in which the help lists them."""


class LazyGroup(TyperGroup):
    """Lists commands by their help alone, and imports the one that is run."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = COMMANDS.get(cmd_name)
        return command and TyperCommand(cmd_name, help=command.help)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, *rest = args
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
    # Threads of torch that wait for each other would keep cores busy that other programs want: 90 s for 10.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    open_output()
    if os.path.expanduser("~") == "~":  # no HOME, and no entry of this user, as in containers
        os.environ["HOME"] = "/nonexistent"
    try:
        try:
            app(prog_name="hetnode")
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)
    except (Exception, BaseExceptionGroup) as error:
        from node.command_runner import exit_code_after  # noqa: PLC0415

        sys.exit(exit_code_after(error))


if __name__ == "__main__":
    main()
