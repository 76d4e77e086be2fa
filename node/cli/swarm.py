"""A whole swarm on one machine: ``hetnode swarm up``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from coordinator.store.log_copy import LOG_FILE, kept_spec
from node import command_runner
from node.cli.options import network, option, records_as_options
from node.cli.spec import SpecOptions
from node.command_runner import TerminalConsole, bad_option
from protocol.spec.run import RunSpec

swarm_app = typer.Typer(help="A whole swarm of real processes on this machine.", no_args_is_help=True)


@swarm_app.command("up")
@records_as_options()
def swarm_up(
    options: SpecOptions,
    folder: Annotated[Path | None, option("Run folder. Default: a new one under runs/.")] = None,
    resume: Annotated[
        Path | None, option("Run folder of a swarm that was stopped or killed: go on where it was.")
    ] = None,
    listen: Annotated[str, network("HOST:PORT of the coordinator; port 0 is free.")] = "127.0.0.1:0",
) -> None:
    """Train on this machine with a real swarm: coordinator, full replica and pipeline, each its own process.

    Ends by itself after the run's rounds and leaves a run folder with metrics.jsonl, loss.png, logs and a
    checkpoint of the global model. Ctrl-C ends every process; --resume goes on from there.
    """
    command_runner.split_address(listen, "--listen")
    text = "a swarm starts on this machine; it says how long it takes when it has measured a round"
    TerminalConsole(highlight=False, soft_wrap=True).print(text)  # at once, also into a pipe
    if resume is None:
        from hetnode.swarm import prepare_new_run  # noqa: PLC0415
        from node.data.tokenizer import pinned  # noqa: PLC0415

        spec = pinned(options.spec(), options.config)
        folder = prepare_new_run(spec, folder, options.config)
    elif folder is not None or replace(options, config=None).any_given:
        raise bad_option(
            "--resume continues the run as it was.",
            "Leave out the options of the specification; --config may say where imported parameters are now.",
        )
    else:
        spec, folder = _prepare_resumed_run(resume, options.config), resume
        from node.cli import finished  # noqa: PLC0415

        if finished.has_finished(folder):
            TerminalConsole(highlight=False, soft_wrap=True).print(
                finished.coordinator_text(folder), markup=False
            )
            return

    from node.views.swarm import SwarmView  # noqa: PLC0415

    SwarmView(spec, folder).run(listen)


def _prepare_resumed_run(folder: Path, config: Path | None) -> RunSpec:
    """The spec of the run that has begun in `folder`, whose imported parameters are beside `config`."""
    from hetnode.swarm import link_given, require_given  # noqa: PLC0415
    from node.local_swarm import initial_of  # noqa: PLC0415

    spec = kept_spec(folder)
    if spec is None or not all((folder / kept).exists() for kept in (LOG_FILE, "nodes")):
        raise bad_option(
            f"{folder} holds no run that could go on.",
            "Give the run folder that 'hetnode swarm up' has printed.",
        )
    start = config.parent if config else None
    require_given(spec, start or initial_of(folder))
    link_given(spec, folder, start)
    return spec
