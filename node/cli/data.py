"""``hetnode data``: data of runs, before they run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from coordinator.base.phrases import counted
from node.cli.options import option, settings_of
from node.cli.output import say
from node.command_runner import TerminalConsole
from node.data.prepare import prepare
from node.data.sources import open_source
from node.data.tokenizer import load_tokenizer
from node.folder import disk_errors_reported
from protocol.run_files.resolve import resolve

data_app = typer.Typer(help="Data of runs.", no_args_is_help=True)


@data_app.command("prepare")
def prepare_data(
    source: Annotated[str, typer.Argument(help="As data.source of a run, but with text, such as hf:dclm.")],
    out: Annotated[Path, option("Folder to write; an interrupted preparation there goes on.")],
    tokenizer: Annotated[str, option("'byte', or the path of a tokenizer.json or tokenizer.model.")] = "byte",
    settings: Annotated[
        list[str] | None, option("data.text_field or data.end_token.", "--set", metavar="NAME=VALUE")
    ] = None,
) -> None:
    """Tokenize a source once, into files that their hashes name; prints the data.source of a run.

    The run has the same samples as with SOURCE. Nodes verify the files, of which each needs a copy.
    """
    given = {"data.source": source, "data.tokenizer": tokenizer} | settings_of(settings or (), "--set")
    data = resolve(overrides=given).data
    opened, encoder = open_source(source, data.text_field), load_tokenizer(data)
    with Progress(console=TerminalConsole(highlight=False)) as progress, disk_errors_reported(out):
        task = progress.add_task("")

        def tell(done: int, parts: int, files: int, tokens: int) -> None:
            text = f"{tokens:,} tokens in {counted(files, 'file')}"
            progress.update(task, description=text, completed=done, total=parts)

        sha256 = prepare(opened, data.text_field, encoder, out, tell)
    say(f"shards:{out.absolute()}#sha256={sha256}")
