"""``hetnode eval``: how well a model predicts text, once or while it learns."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from node import command_runner
from node.cli.model import PLACES
from node.cli.options import Device, option
from node.cli.output import say
from node.command_runner import TerminalConsole, bad_option
from node.here.nodes import place_of
from protocol.run_files.link_text import width_text

if TYPE_CHECKING:
    from node.cli.evaluating import Questions
    from node.experiment.evaluate import Evaluation


def evaluate(
    run: Annotated[Path, typer.Argument(help=f"{PLACES}; or a Hugging Face folder.", callback=place_of)],
    data: Annotated[
        list[str] | None,
        option(
            "A source, as data.source has it, or the name of one of the run's. Default: that of validation. "
            "With --every also NAME=SOURCE, and several."
        ),
    ] = None,
    split: Annotated[
        str, option("'held-out': what runs keep back of this data for validation. 'all' of it.")
    ] = "held-out",
    mode: Annotated[
        str, option("'uncompressed': the plain model. 'compressed': through the links of a pipeline.")
    ] = "uncompressed",
    batches: Annotated[
        int | None, option("Micro-batches of the run's size to measure on. Default: all there are.", min=1)
    ] = None,
    device: Device = "cpu",
    every: Annotated[
        int | None,
        option(
            "Follow a node or swarm of this machine until its run ends: after so many rounds each, measure "
            "the newest model, let the model continue prompts, and tell the coordinator.",
            min=1,
        ),
    ] = None,
    prompts: Annotated[
        Path | None, option("With --every: file of prompts, one a line. Default: an empty one.")
    ] = None,
    tasks: Annotated[
        str | None,
        option("With --every: tasks of lm-evaluation-harness (extra 'eval'), such as arc_easy,piqa."),
    ] = None,
    as_json: Annotated[bool, option("Print one JSON object.", "--json")] = False,
) -> None:
    """Measure how well a model predicts text: loss, perplexity, bits per byte.

    With --every this is a process of the lowest priority beside the node, which never waits for it.
    """
    from node.cli.evaluating import Questions, evaluate_every, read_prompts  # noqa: PLC0415
    from node.cli.following import run_at  # noqa: PLC0415
    from node.core.worker.compute import Compute  # noqa: PLC0415
    from node.experiment import evaluate as measuring  # noqa: PLC0415
    from node.machine.devices import check_device  # noqa: PLC0415

    documents = command_runner.one_of(measuring.Documents, split, "--split")
    forward = command_runner.one_of(measuring.ForwardMode, mode, "--mode")
    opened = Compute(device=check_device(Compute(device)).device).open()
    sets, named = tuple(data or ()), tuple(filter(None, (tasks or "").split(",")))
    asked = Questions(sets, documents, forward, batches, read_prompts(prompts), named, opened)
    if every is not None:
        command_runner.configure_logging()
        evaluate_every(run_at(run), every, asked, as_json)
    elif prompts or tasks or len(sets) > 1:
        raise bad_option("--prompts, --tasks and several --data are for --every.", "Give it, too.")
    else:
        _evaluate_once(run, asked, as_json)


def _evaluate_once(run: Path, asked: Questions, as_json: bool) -> None:
    """Measure the model at `run` on one set, and print the figures."""
    from hetnode.models import checkpoint_at, is_published  # noqa: PLC0415
    from node.data.tokenizer import find_tokenizer  # noqa: PLC0415
    from node.experiment import evaluate as measuring  # noqa: PLC0415

    loaded = checkpoint_at(run, asked.device)
    spec = loaded.spec
    source, is_whole = measuring.measured_source(spec.data, *asked.sets or (None,))
    terminal = TerminalConsole(stderr=True)
    with terminal.status("reading the data") as shown:

        def progress(so_far: Evaluation) -> None:
            shown.update(f"{so_far.tokens:,} tokens, loss {so_far.loss:.4f}")

        chosen = measuring.Documents.ALL if is_whole else asked.documents
        path = find_tokenizer(spec.data, run)
        how = chosen, asked.mode, asked.batches, path, progress, source.text_field
        found = measuring.evaluate(loaded, source.source, *how)
    is_compressed = asked.mode is measuring.ForwardMode.COMPRESSED
    link = f"{width_text([spec.link.k], spec.model.width)}, {spec.link.dtype}"
    is_run = not is_published(run)
    facts = {
        "loss": found.loss,
        "perplexity": found.perplexity,
        "bits_per_byte": found.bits_per_byte,
        "tokens": found.tokens,
        "bytes": found.bytes,
        "mode": asked.mode.value,
        "link": link if is_compressed else None,
        "data": source.source,
        "split": chosen.value,
        "model": str(run),
        "run": spec.name if is_run else None,
        "round": loaded.round_number if is_run else None,
    }
    if as_json:
        say(json.dumps({name: _in_json(value) for name, value in facts.items()}, allow_nan=False))
    else:
        of_run = f" (run {spec.name}, round {loaded.round_number})" if is_run else ""
        say(_EVALUATION.format(**facts, of_run=of_run, through=f" ({link})" if is_compressed else ""))


_EVALUATION = """\
model          {model}{of_run}
data           {data}, {split}: {tokens:,} tokens, {bytes:,} bytes
forward mode   {mode}{through}
loss           {loss:.4f} nats per token
perplexity     {perplexity:.4f}
bits per byte  {bits_per_byte:.4f}"""


def _in_json(value: object) -> object:
    """JSON has no numbers that are not finite."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
