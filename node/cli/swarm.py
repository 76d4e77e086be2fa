"""A whole swarm on one machine: ``hetnode swarm up``."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Annotated

import typer

from coordinator.store.log_copy import LOG_FILE, kept_spec
from node import command_runner
from node.cli.options import network, option, records_as_options
from node.cli.spec import SpecOptions, pinned
from node.command_runner import TerminalConsole, bad_option
from node.folder import disk_errors_reported, make_usable
from node.ipc.modules import COMMAND_MODULES
from node.ipc.template import own_template
from protocol.errors import ErrorCode, HetnodeError
from protocol.spec.run import RunSpec
from protocol.trust.private_file import write_whole

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
        spec = pinned(options.spec(), options.config)
        folder = _prepare_new_run(spec, folder, options.config)
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


def _prepare_new_run(spec: RunSpec, folder: Path | None, config: Path | None) -> Path:
    """Check the data and the given parameters before any process starts. Returns the run folder."""
    from node.data.declared import CONFIG_FILE, as_file, declared_beside  # noqa: PLC0415
    from node.data.stream import open_stream  # noqa: PLC0415
    from node.data.tokenizer import FileTokenizer, find_tokenizer, load_tokenizer  # noqa: PLC0415

    own_template(COMMAND_MODULES)  # imports torch and the transport while the data is checked
    own_tokenizer = find_tokenizer(spec.data, config)
    open_stream(spec, tokenizer=own_tokenizer)
    start = config.parent if config else None
    _require_initial(spec, start)
    folder = _new_run_folder(spec, folder)
    _link_initial(spec, folder, start)
    if own_tokenizer is not None:  # nodes look for it in the run folder, and so do later commands
        kept = load_tokenizer(spec.data, own_tokenizer)
        assert isinstance(kept, FileTokenizer)
        write_whole(folder / kept.file_name, kept.content)
        write_whole(folder / CONFIG_FILE, as_file(declared_beside(Path(own_tokenizer), kept)))
    return folder


def _prepare_resumed_run(folder: Path, config: Path | None) -> RunSpec:
    """The spec of the run that has begun in `folder`, whose imported parameters are beside `config`."""
    from node.local_swarm import initial_of  # noqa: PLC0415

    spec = kept_spec(folder)
    if spec is None or not all((folder / kept).exists() for kept in (LOG_FILE, "nodes")):
        raise bad_option(
            f"{folder} holds no run that could go on.",
            "Give the run folder that 'hetnode swarm up' has printed.",
        )
    start = config.parent if config else None
    _require_initial(spec, start or initial_of(folder))
    _link_initial(spec, folder, start)
    return spec


def _require_initial(spec: RunSpec, folder: Path | None) -> None:
    if spec.initial is not None:  # otherwise torch need not be imported
        from node.checkpoint.initial import require_initial  # noqa: PLC0415

        require_initial(spec, folder)


def _link_initial(spec: RunSpec, folder: Path, start: Path | None) -> None:
    """Have the nodes of the swarm in `folder` find the parameters in `start`; None leaves it as it is."""
    from node.local_swarm import initial_of  # noqa: PLC0415

    link = initial_of(folder)
    if spec.initial is None or start is None or start.resolve() == link.resolve():
        return
    with disk_errors_reported(link):
        link.unlink(missing_ok=True)
        link.symlink_to(start.resolve())


def _new_run_folder(spec: RunSpec, folder: Path | None) -> Path:
    """An empty folder for a new run. Raises HetnodeError RUN_FOLDER_IN_USE."""
    if folder is None:
        folder = next(path for i in count(1) if not (path := Path("runs") / f"{spec.preset}-{i}").exists())
    if any(make_usable(folder).iterdir()):
        raise HetnodeError(
            ErrorCode.RUN_FOLDER_IN_USE,
            f"The run folder {folder} is not empty.",
            f"Go on with its run with --resume {folder}, or give another --folder.",
        )
    return folder
