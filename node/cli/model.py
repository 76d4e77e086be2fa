"""What can be done with a trained model: ``hetnode generate``, ``export`` and ``import``."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from node import command_runner
from node.cli.options import option, records_as_options
from node.cli.output import say
from node.cli.spec import SpecOptions
from node.command_runner import TerminalConsole, bad_option
from node.here.nodes import place_of
from protocol.errors import ErrorCode, HetnodeError
from protocol.run_files.resolve import resolve
from protocol.spec.run import RunSpec

if TYPE_CHECKING:
    from node.hugging_face.importing import Published

_LIKELIEST = 40
"""Tokens among which ``hetnode generate`` samples, as most programs do by default."""


def _places_of(runs: list[Path]) -> list[Path]:
    return [place_of(run) for run in runs]


class ExportFormat(StrEnum):
    HF = "hf"
    CHECKPOINT = "checkpoint"


PLACES = "Folder of a run, node or checkpoint; or the name of a swarm in ./runs, a run or a node here"
Run = Annotated[Path, typer.Argument(help=f"{PLACES}.", callback=place_of)]
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def generate(
    run: Run,
    prompt: Annotated[str, option("Text to continue.")] = "def ",
    tokens: Annotated[int, option("Tokens to generate.", min=1)] = 200,
    temperature: Annotated[float, option("0 always takes the likeliest token.", min=0)] = 0.8,
    seed: Annotated[int, option("Seed of the sampling.")] = 0,
) -> None:
    """Continue a text with the model of a run, to see what it has learned."""
    from hetnode.models import checkpoint_at  # noqa: PLC0415
    from node.data.tokenizer import find_tokenizer  # noqa: PLC0415
    from node.generate import generate as continue_text  # noqa: PLC0415

    loaded = checkpoint_at(run)
    path = find_tokenizer(loaded.spec.data, run)
    pieces = continue_text(loaded, prompt, tokens, temperature, _LIKELIEST, seed, path)
    say(prompt, end="")
    for piece in pieces:
        say(piece, end="")
        sys.stdout.flush()
    say("")


def export(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help=f"{PLACES}. Several: the checkpoints of members that each kept some of the stages.",
            callback=_places_of,
        ),
    ],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write.")],
    format: Annotated[
        ExportFormat,
        option("'hf': the layout of Hugging Face. 'checkpoint': one complete checkpoint, for RUN elsewhere."),
    ] = ExportFormat.HF,
    dtype: Annotated[str, option("Of the weights: fp32, bf16 or fp16.")] = "fp32",
    shard_size: Annotated[str, option("Largest weight file, such as 5GB or 500MB.")] = "5GB",
    hub: Annotated[
        str | None,
        option(
            "Also put it into this repository of the Hugging Face Hub, OWNER/NAME; a new one is private. The "
            "token is that of 'hf auth login' or HF_TOKEN."
        ),
    ] = None,
    every: Annotated[
        int | None,
        option(
            "Follow a node or swarm of this machine until its run ends: write DIR anew after so many rounds.",
            min=1,
        ),
    ] = None,
) -> None:
    """Write the model of a run as a folder that transformers loads without remote code.

    With --every this is a process of the lowest priority beside the node, which never waits for it.
    """
    from node.checkpoint import global_model  # noqa: PLC0415
    from node.cli.following import run_at  # noqa: PLC0415
    from node.cli.publishing import ExportTarget, publish, publish_every  # noqa: PLC0415
    from node.hugging_face.weights import DTYPES  # noqa: PLC0415

    if dtype not in DTYPES:
        raise bad_option(f"There is no dtype '{dtype}'.", f"Use one of: {', '.join(DTYPES)}.")
    target = ExportTarget(folder, DTYPES[dtype], _bytes(shard_size), hub)
    if (every or hub) and (format is ExportFormat.CHECKPOINT or (every and len(runs) > 1)):
        raise bad_option(
            "--every is for one run, and --hub for the layout of Hugging Face.", "Leave out the others."
        )
    if every:
        command_runner.configure_logging()
        publish_every(run_at(runs[0]), every, target)
        return
    found = [global_model.find(run) for run in runs]
    if format is ExportFormat.CHECKPOINT:
        global_model.assemble(found, folder)
        TerminalConsole().print(f"complete checkpoint in {folder}", highlight=False, markup=False)
        return
    publish(runs[0], found, target)
    if not (folder / "tokenizer.model").exists():
        say("llama.cpp's converter takes this vocabulary if it is one of those that it lists.")


@records_as_options(options=("data", "rounds", "inner_steps", "replicas", "pipelines", "stages"))
def import_model(
    model: Annotated[
        Path,
        typer.Argument(metavar="HF_DIR", help="Folder of a Llama, Mistral, Qwen, SmolLM or OLMo2 model."),
    ],
    out: Annotated[Path, option("Folder to write: run.toml and the parameters.")],
    options: SpecOptions,
) -> None:
    """Start a run from an existing model: writes a run file and the parameters with which it begins.

    Samples are as long as the model's context, at most 2048 tokens, or --set model.context=L. The learning
    rate is 1e-4, or --set inner.learning_rate=X. Every member needs these parameters: a copy of the folder,
    or of the model, imported with the same run file. Their digests are part of the run's specification.
    """
    from node.hugging_face import importing  # noqa: PLC0415

    importing.require_empty(out)
    former = resolve(file=options.config) if options.config else None
    if former is None or former.initial is None:
        published, spec, place = _import_for_new_run(model, former, options)
    elif not replace(options, config=None).any_given:
        published, spec, place = _import_for_known_run(model, options.config, former)
    else:
        raise bad_option(
            f"{options.config} is the file of a run whose parameters are settled.",
            "Leave out the options of the specification.",
        )
    started = importing.import_model(published, spec, out, place)
    say(f"run {started.name} starts from {model}: hetnode swarm up --config {out / importing.RUN_FILE}")
    if former is None or former.initial is None:
        rate = started.inner.learning_rate
        say(f"Learning rate {rate:g}. {importing.PRETRAINED_RATE:g} suits a model that has learned already.")
        if published.base is None:
            say(
                "The folder does not tell the model's name on the hub: the card of an export will not either."
            )
    if started.model.context < published.context:
        say(f"Samples have {started.model.context} tokens; the model is made for {published.context}.")
    if published.tied and not started.model.tied_head:
        say("The embedding of this model is tied to its head; from now on they are trained apart.")
        several = "--set swarm.stages=1 --set swarm.pipelines=0" if started.swarm.stages > 1 else ""
        say(f"To keep them tied: {several or 'leave out model.tied_head'}.")


def _import_for_known_run(
    model: Path, config: Path | None, spec: RunSpec
) -> tuple[Published, RunSpec, str | None]:
    """The model again, for another member of the run in the file `config`. The spec stays as it is."""
    from node.data.tokenizer import find_tokenizer  # noqa: PLC0415
    from node.hugging_face import importing  # noqa: PLC0415

    published = importing.inspect(model, spec.model.context)
    return published, spec, find_tokenizer(spec.data, config, model)


def _import_for_new_run(
    model: Path, former: RunSpec | None, options: SpecOptions
) -> tuple[Published, RunSpec, str | None]:
    """The model, the spec of a run that starts from it, and the tokenizer file to keep beside it, if any.

    `former` is the spec in the run file of `options`, if they name one. Its learning rate stays, as one that
    an option names; a preset's is for a model that has learned nothing.
    """
    from node.data.tokenizer import FileTokenizer, find_tokenizer, load_tokenizer, pinned  # noqa: PLC0415
    from node.hugging_face import importing  # noqa: PLC0415

    published = importing.inspect(model, options.given.get("model.context"))
    # The model's own tokenizer, unless an option or the run file names another one.
    is_named = "data.tokenizer" in options.given or (former is not None and former.data.tokenizer != "byte")
    own = None if is_named else importing.tokenizer_of(published)
    overrides = {f"model.{name}": value for name, value in published.model.items()}
    if decided := sorted((overrides.keys() - {"model.context"}) & options.given.keys()):
        raise bad_option(f"The model's folder decides {', '.join(decided)}.", "Leave them out.")
    if former is None and "inner.learning_rate" not in options.given:
        overrides["inner.learning_rate"] = importing.PRETRAINED_RATE
    if own:
        overrides |= {"data.tokenizer": own.file_name, "data.tokenizer_sha256": own.sha256}
        overrides |= importing.named_end(own)
    with _naming_k(options, published.model["width"]):
        spec = options.spec(**overrides)
        if published.tied and spec.swarm.stages == 1 and "model.tied_head" not in options.given:
            spec = options.spec(**overrides, **{"model.tied_head": True})
    place = str(model / own.file_name) if own else find_tokenizer(spec.data, options.config)
    spec = pinned(spec, tokenizer=place)
    used = load_tokenizer(spec.data, place)
    if not isinstance(used, FileTokenizer):
        return published, spec, None
    data = {**spec.data.model_dump(), "tokenizer": used.file_name}  # it will lie beside the run file
    return (
        published,
        RunSpec.model_validate({**spec.model_dump(), "data": data}),
        place or spec.data.tokenizer,
    )


@contextmanager
def _naming_k(options: SpecOptions, width: int) -> Iterator[None]:
    """Says by which option a preset's link is made to fit the imported model of this width."""
    try:
        yield
    except HetnodeError as error:
        if (
            error.code is not ErrorCode.BAD_SPEC
            or "link.k" in options.given
            or options.spec().link.k <= width
        ):
            raise
        raise HetnodeError(
            error.code, error.cause, "Give --set link.k=K, at most the model's width."
        ) from None


def _bytes(size: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?B)?", size.strip().upper())
    nbytes = int(float(match[1]) * _UNITS[match[2] or "B"]) if match else 0
    if nbytes < 1:
        raise bad_option(f"'{size}' is no size of a file.", "Use a form like 5GB or 500MB.")
    return nbytes
