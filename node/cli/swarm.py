"""A whole swarm on one machine: ``hetnode swarm up``."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from node import command_runner
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
    spec_of,
)
from node.folder import disk_errors_reported, make_usable
from protocol.errors import ErrorCode, HetnodeError
from protocol.spec.resolve import resolve
from protocol.spec.run import RunSpec

swarm_app = typer.Typer(help="A whole swarm of real processes on this machine.", no_args_is_help=True)

_NETWORK = "Network"


@swarm_app.command("up")
def swarm_up(
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
    folder: Annotated[Path | None, typer.Option(help="Run folder. Default: a new one under runs/.")] = None,
    resume: Annotated[
        Path | None,
        typer.Option(help="Run folder of a swarm that was stopped or killed: go on where it was."),
    ] = None,
    initial: Annotated[
        Path | None,
        typer.Option(
            help="Of a run that starts from an imported model: what 'hetnode import' has written. Default: "
            "the folder of --config."
        ),
    ] = None,
    listen: Annotated[
        str, typer.Option(help="HOST:PORT of the coordinator; port 0 is free.", rich_help_panel=_NETWORK)
    ] = "127.0.0.1:0",
) -> None:
    """Train on this machine with a real swarm: coordinator, full replica and pipeline, each its own process.

    Ends by itself after the run's rounds and leaves a run folder with metrics.jsonl, loss.png, logs and a
    checkpoint of the global model. Ctrl-C ends every process; --resume goes on from there.
    """
    from node.checkpoint.initial import require_initial  # noqa: PLC0415
    from node.data.stream import open_stream  # noqa: PLC0415
    from node.data.tokenizer import find_tokenizer  # noqa: PLC0415
    from node.local_swarm import initial_of  # noqa: PLC0415
    from node.views.swarm import SwarmView  # noqa: PLC0415

    if resume is not None:
        given = (preset, config, data, tokenizer, rounds, inner_steps, replicas, pipelines, stages, k, seed)
        if folder is not None or any(option is not None for option in given):
            raise command_runner.bad_option(
                "--resume goes on with the run as it was.", "Leave out the options of the specification."
            )
        spec = _spec_of_run(resume)
        require_initial(spec, initial or initial_of(resume))
        _link_initial(spec, resume, initial)
        SwarmView(spec, resume).run(listen)
        return
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
        initial,
    )
    command_runner.split_address(listen, "--listen")
    own_tokenizer = find_tokenizer(spec.data, config, initial)
    # What is wrong with the data is better said before any process starts.
    open_stream(spec, tokenizer=own_tokenizer)
    start = initial or (config.parent if config else None)
    require_initial(spec, start)
    folder = _new_run_folder(spec, folder)
    _link_initial(spec, folder, start)
    _keep_tokenizer(folder, own_tokenizer)
    SwarmView(spec, folder).run(listen)


def _link_initial(spec: RunSpec, folder: Path, start: Path | None) -> None:
    """Have the nodes of the swarm in `folder` find the parameters in `start`; None leaves it as it is."""
    from node.local_swarm import initial_of  # noqa: PLC0415

    link = initial_of(folder)
    if spec.initial is None or start is None or start.resolve() == link.resolve():
        return
    with disk_errors_reported(link):
        link.unlink(missing_ok=True)
        link.symlink_to(start.resolve())


def _keep_tokenizer(folder: Path, own_tokenizer: str | None) -> None:
    """A copy in the run folder: there the nodes find it, and whoever uses the model later from elsewhere."""
    from node.data.tokenizer import TOKENIZER_FILE  # noqa: PLC0415

    if own_tokenizer is not None:
        shutil.copyfile(own_tokenizer, folder / TOKENIZER_FILE)


def _spec_of_run(folder: Path) -> RunSpec:
    """The spec of the run that has begun in `folder`. Raises BAD_OPTION."""
    file = folder / "run.toml"
    if not all(kept.exists() for kept in (file, folder / "coordinator.sqlite", folder / "nodes")):
        raise command_runner.bad_option(
            f"{folder} holds no run that could go on.",
            "Give the run folder that 'hetnode swarm up' has printed.",
        )
    return resolve(file=file)


def _new_run_folder(spec: RunSpec, folder: Path | None) -> Path:
    """An empty folder for a new run. Raises HetnodeError RUN_FOLDER_IN_USE."""
    if folder is None:
        runs = Path("runs")
        number = 1
        while (runs / f"{spec.preset}-{number}").exists():
            number += 1
        folder = runs / f"{spec.preset}-{number}"
    if any(make_usable(folder).iterdir()):
        raise HetnodeError(
            ErrorCode.RUN_FOLDER_IN_USE,
            f"The run folder {folder} is not empty.",
            f"Go on with its run with --resume {folder}, or give another --folder.",
        )
    return folder
