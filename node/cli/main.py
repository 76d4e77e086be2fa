"""The command ``hetnode``: which commands there are, and where each is defined.

A command's module is imported when the command runs, so that ``hetnode --help`` and the small commands do not
wait for imports of the large ones. Heavy imports of a command are inside its function for the same reason.
"""

from __future__ import annotations

import ast
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from node.cli.family import CommandFamily
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
        raise AssertionError(f"the module {self.module} has no {self.attribute}")

    def load(self, name: str) -> Any:
        """The command as typer runs it."""
        found = getattr(import_module(f"{__package__}.{self.module}"), self.attribute)
        if isinstance(found, typer.Typer):
            found.rich_markup_mode, found.info.cls = None, CommandFamily
            group = typer.main.get_group(found)
            group.name = name
            return group
        single = typer.Typer(add_completion=False, rich_markup_mode=None)
        single.command(name)(found)
        return typer.main.get_command(single)


FAMILIES = {
    "Try it on this machine": {
        "swarm": LazyCommand("swarm", "swarm_app"),
        "plan": LazyCommand("plan", "plan"),
        "spec": LazyCommand("spec", "spec_app"),
        "data": LazyCommand("data", "data_app"),
        "experiment": LazyCommand("experiment", "experiment_app"),
    },
    "Take part in a run": {
        "join": LazyCommand("join", "join"),
        "doctor": LazyCommand("doctor", "doctor"),
        "watch": LazyCommand("watch", "watch"),
        "leave": LazyCommand("own_node", "leave"),
        "pause": LazyCommand("own_node", "pause"),
        "resume": LazyCommand("own_node", "resume"),
        "service": LazyCommand("service", "service_app"),
        "health": LazyCommand("health", "health"),
        "relay": LazyCommand("relay", "relay"),
        "receipt": LazyCommand("receipt", "receipt"),
        "owner": LazyCommand("owner", "owner"),
    },
    "See what a run does": {
        "status": LazyCommand("status", "status"),
        "explain": LazyCommand("explain", "explain"),
        "credit": LazyCommand("credit", "credit"),
    },
    "Use the model": {
        "generate": LazyCommand("model", "generate"),
        "eval": LazyCommand("evaluate", "evaluate"),
        "export": LazyCommand("model", "export"),
        "import": LazyCommand("model", "import_model"),
    },
    "Operate a run": {
        "coordinator": LazyCommand("coordinator", "coordinator"),
        "invite": LazyCommand("operator", "invite_app"),
        "peers": LazyCommand("operator", "peers_app"),
        "run": LazyCommand("run", "run_app"),
        "rollback": LazyCommand("run", "rollback"),
        "site": LazyCommand("site", "site"),
        "incident": LazyCommand("incident", "incident_app"),
    },
}
"""In the order in which the help lists them."""
COMMANDS = {name: command for family in FAMILIES.values() for name, command in family.items()}


class LazyGroup(TyperGroup):
    """Lists commands by their help alone, and imports the one that is run."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = COMMANDS.get(cmd_name)
        return command and TyperCommand(cmd_name, help=command.help)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for family, commands in FAMILIES.items():
            with formatter.section(family):
                formatter.write_dl([(name, command.help) for name, command in commands.items()])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, *rest = args
        if name in COMMANDS:
            return name, COMMANDS[name].load(name), rest
        self.commands = dict.fromkeys(COMMANDS)  # type: ignore[assignment]  # only the names are read
        return super().resolve_command(ctx, args)  # says which one was meant


app = typer.Typer(
    cls=LazyGroup,
    name="hetnode",
    help="Pre-train one language model together, from home GPUs and datacenters alike. Begin with "
    "'hetnode swarm up', on this machine alone, or 'hetnode join INVITE', in the run of others.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
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
        from protocol.server.version import program_version, source_commit  # noqa: PLC0415
        from protocol.types import PROTOCOL_VERSION  # noqa: PLC0415

        sources = f", commit {found}" if (found := source_commit()) else ""
        typer.echo(f"hetnode {program_version()} (protocol {PROTOCOL_VERSION}{sources})")
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
            with suppress(BrokenPipeError):  # the reader of the output is gone
                sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)
    except (Exception, BaseExceptionGroup) as error:
        from node.command_runner import exit_code_after  # noqa: PLC0415

        sys.exit(exit_code_after(error))


if __name__ == "__main__":
    main()
