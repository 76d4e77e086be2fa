"""The options that make a run specification, for every command that takes them, and ``hetnode spec``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from protocol.spec.resolve import resolve
from protocol.spec.run import RunSpec

spec_app = typer.Typer(help="Run specifications.", no_args_is_help=True)

_SPEC = "Run specification"

Preset = Annotated[
    str | None, typer.Option(help="tiny, nano, 178m, 512m, 1b or 70b. Default: tiny.", rich_help_panel=_SPEC)
]
Config = Annotated[
    Path | None,
    typer.Option(help="TOML run file; see 'hetnode spec show --toml'.", rich_help_panel=_SPEC),
]
Data = Annotated[
    str | None,
    typer.Option(help="builtin, text:PATH, jsonl:PATH or hf:NAME\\[/CONFIG].", rich_help_panel=_SPEC),
]
Tokenizer = Annotated[
    str | None, typer.Option(help="'byte' or the path of a tokenizer.json.", rich_help_panel=_SPEC)
]
Rounds = Annotated[int | None, typer.Option(help="Outer rounds of the run.", rich_help_panel=_SPEC)]
Steps = Annotated[
    int | None, typer.Option("--inner-steps", help="H, inner steps per round.", rich_help_panel=_SPEC)
]
Replicas = Annotated[int | None, typer.Option(help="Full replicas.", rich_help_panel=_SPEC)]
Pipelines = Annotated[
    int | None, typer.Option(help="Pipeline replicas, one member per stage.", rich_help_panel=_SPEC)
]
Stages = Annotated[
    int | None, typer.Option(help="S, stages into which the layers are cut.", rich_help_panel=_SPEC)
]
LinkK = Annotated[
    int | None,
    typer.Option("--k", help="Subspace width of the links; 0 sends uncompressed.", rich_help_panel=_SPEC),
]
Seed = Annotated[
    int | None, typer.Option(help="Seed of weights, basis and data order.", rich_help_panel=_SPEC)
]


def spec_of(config: Path | None, preset: str | None, **overrides: Any) -> RunSpec:
    """The spec that the options of a command name. Raises as :func:`protocol.spec.resolve.resolve`."""
    names = {
        "data": "data.source",
        "tokenizer": "data.tokenizer",
        "steps": "inner.steps",
        "replicas": "swarm.replicas",
        "pipelines": "swarm.pipelines",
        "stages": "swarm.stages",
        "k": "link.k",
    }
    return resolve(preset, config, {names.get(name, name): value for name, value in overrides.items()})


def pinned(spec: RunSpec, *search_paths: Path | None, tokenizer: str | None = None) -> RunSpec:
    """Pin the tokenizer file by its hash, so that every node must have the same one.

    `tokenizer` is where it lies now, if that is elsewhere than the spec says; else one that is known by its
    hash is looked for in `search_paths`, too (node.data.tokenizer.find_tokenizer).
    """
    from node.data.tokenizer import check_tokenizer, find_tokenizer, load_tokenizer  # noqa: PLC0415

    tokenizer = tokenizer or find_tokenizer(spec.data, *search_paths)
    if spec.data.tokenizer != "byte" and not spec.data.tokenizer_sha256:
        found = load_tokenizer(spec.data, tokenizer)
        spec = RunSpec.model_validate(
            {**spec.model_dump(), "data": {**spec.data.model_dump(), "tokenizer_sha256": found.sha256}}
        )
    check_tokenizer(spec, tokenizer)
    return spec


@spec_app.command("show")
def spec_show(
    preset: Annotated[str | None, typer.Argument(help="tiny, nano, 178m, 512m, 1b or 70b.")] = None,
    config: Config = None,
    toml: Annotated[bool, typer.Option(help="Print a run file to start from instead.")] = False,
) -> None:
    """Print a preset: its parameters, and the bytes of each stage, link and round."""
    spec = resolve(preset, config)
    if toml:
        sys.stdout.write(spec.toml)
    else:
        from node.views.spec import spec_view  # noqa: PLC0415

        Console().print(spec_view(spec))
