"""What can be done with a trained model: ``hetnode generate`` and ``hetnode checkpoint``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

checkpoint_app = typer.Typer(help="Checkpoints of the global model.", no_args_is_help=True)


def generate(
    run: Annotated[Path, typer.Argument(help="Run folder, node folder or checkpoint folder.")],
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "def ",
    tokens: Annotated[int, typer.Option(help="Tokens to generate.", min=1)] = 200,
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest token.", min=0)] = 0.8,
    top_k: Annotated[int, typer.Option(help="Sample among the likeliest; 0 among all.", min=0)] = 40,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    tokenizer: Annotated[
        Path | None, typer.Option(help="The run's tokenizer.json, if it is elsewhere on this machine.")
    ] = None,
) -> None:
    """Continue a text with the model of a run, to see what it has learned."""
    from node import checkpoint  # noqa: PLC0415
    from node.generate import generate as continue_text  # noqa: PLC0415

    loaded = checkpoint.read(checkpoint.find(run))
    pieces = continue_text(
        loaded, prompt, tokens, temperature, top_k, seed, str(tokenizer) if tokenizer else None
    )
    sys.stdout.write(prompt)
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")


@checkpoint_app.command("assemble")
def checkpoint_assemble(
    parts: Annotated[list[Path], typer.Argument(help="Checkpoint folders of the members.")],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
) -> None:
    """Put the stages that several members kept together into one complete checkpoint."""
    from node import checkpoint  # noqa: PLC0415

    checkpoint.assemble([checkpoint.find(part) for part in parts], out)
    Console().print(f"complete checkpoint in {out}", highlight=False, markup=False)
