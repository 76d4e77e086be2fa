"""The options that make a run specification, for every command that takes them, and ``hetnode spec``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from node.cli.options import option, panel, settings_of
from node.cli.output import say
from node.command_runner import TerminalConsole
from protocol.run_files.resolve import resolve, to_toml
from protocol.spec.run import RunSpec

spec_app = typer.Typer(help="Run specifications.", no_args_is_help=True)

spec_option = panel("Run specification")
Config = Annotated[Path | None, spec_option("TOML run file; see 'hetnode spec show --toml'.")]


@dataclass(frozen=True)
class SpecOptions:
    """What the options of a command say of a run specification; None leaves it to the preset or file."""

    preset: Annotated[str | None, spec_option("tiny, nano, 178m, 512m, 1b, 8b or 70b. Default: tiny.")] = None
    config: Config = None
    data: Annotated[
        str | None, spec_option("builtin, or text, jsonl, parquet:PATH, hf:NAME, shards:FOLDER#sha256=HEX.")
    ] = None
    rounds: Annotated[int | None, spec_option("Outer rounds of the run.")] = None
    inner_steps: Annotated[int | None, spec_option("H, inner steps per round.")] = None
    replicas: Annotated[int | None, spec_option("Full replicas.")] = None
    pipelines: Annotated[int | None, spec_option("Pipeline replicas, one member per stage.")] = None
    stages: Annotated[int | None, spec_option("S, stages into which the layers are cut.")] = None
    settings: Annotated[
        list[str] | None,
        spec_option(
            "Any setting of docs/reference/settings.md, such as link.k=8; may be repeated.",
            "--set",
            metavar="NAME=VALUE",
        ),
    ] = None

    @property
    def any_given(self) -> bool:
        return any(value is not None and value != [] for value in vars(self).values())

    @property
    def given(self) -> dict[str, Any]:
        """The settings that the options name, by their full names; those of --set come last."""
        own = {
            "data.source": self.data,
            "rounds": self.rounds,
            "inner.steps": self.inner_steps,
            "swarm.replicas": self.replicas,
            "swarm.pipelines": self.pipelines,
            "swarm.stages": self.stages,
        }
        named = {name: value for name, value in own.items() if value is not None}
        return named | settings_of(self.settings or (), "--set")

    def spec(self, **overrides: Any) -> RunSpec:
        """The specification with these options and then `overrides`, which have the full names of fields.

        Raises as :func:`protocol.run_files.resolve.resolve`; HetnodeError BAD_OPTION.
        """
        return resolve(self.preset, self.config, self.given | overrides)


@spec_app.command("show")
def spec_show(
    preset: Annotated[
        str | None,
        typer.Argument(metavar="PRESET|FILE", help="tiny, nano, 178m, 512m, 1b, 8b, 70b; or a run file."),
    ] = None,
    toml: Annotated[bool, option("Print a run file to start from instead.")] = False,
) -> None:
    """Print a preset: its parameters, and the bytes of each stage, link and round."""
    is_file = preset is not None and (preset.endswith(".toml") or Path(preset).is_file())
    spec = resolve(file=Path(preset)) if preset is not None and is_file else resolve(preset)
    if toml:
        say(to_toml(spec), end="")
    else:
        from node.views.spec import spec_view  # noqa: PLC0415

        TerminalConsole().print(spec_view(spec))
