"""``hetnode eval --every``: measures a run's newest models beside its nodes, and tells the coordinator."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from node.cli.following import FAILURES, FollowedRun, follow
from node.cli.output import say
from node.command_runner import bad_option
from node.data.own import named
from node.data.sources import names_files
from protocol.errors import ErrorCode, HetnodeError
from protocol.status import ModelSample

if TYPE_CHECKING:
    import torch

    from node.checkpoint.global_model import Checkpoint
    from node.experiment.evaluate import Documents, ForwardMode
    from protocol.spec.data import DataSource

log = logging.getLogger(__name__)

PROMPTS, UNNAMED = "prompts", "validation"
"""Under which names samples, and the figures of a source without a name, are told."""
SAMPLE_TOKENS = 128
_TEMPERATURE, _TOP_K, _SEED = 0.8, 40, 0
_MOST_PROMPTS, _MOST_LETTERS = 8, 1000
"""Prompts, and letters of a prompt or its text, that the coordinator takes."""
_TELL_SECONDS = 30.0


@dataclass(frozen=True)
class Questions:
    """What to ask each model.

    Attributes:
        sets: sources, each perhaps as NAME=SOURCE; none: what the run is measured on.
        batches: micro-batches of each set; None: as many as the run measures.
        tasks: of lm-evaluation-harness.
    """

    sets: tuple[str, ...]
    documents: Documents
    mode: ForwardMode
    batches: int | None
    prompts: tuple[str, ...]
    tasks: tuple[str, ...]
    device: torch.device


def read_prompts(file: Path | None) -> tuple[str, ...]:
    """The lines of `file` that are not empty; without it the begin of a document. Raises BAD_OPTION."""
    if file is None:
        return ("",)
    try:
        found = tuple(line for line in file.read_text().splitlines() if line)
    except (OSError, ValueError) as error:
        raise bad_option(f"--prompts {file} cannot be read: {error}.", "Check its name.") from None
    if not 0 < len(found) <= _MOST_PROMPTS or max(map(len, found)) > _MOST_LETTERS:
        raise bad_option(
            f"{file} has not 1 to {_MOST_PROMPTS} prompts, a line of {_MOST_LETTERS} letters each.",
            "Leave some out.",
        )
    return found


def evaluate_every(run: FollowedRun, every: int, questions: Questions, as_json: bool) -> None:
    """Ask each `every`-th model of `run`, print the answers and tell them, until the run is over.

    Raises HetnodeError: MISSING_EXTRA; BAD_OPTION for a file without a name, whose path everybody would see.
    """
    for text in questions.sets:
        if not named(text)[0] and ":" in text and names_files(text):  # else one of the run's
            raise bad_option(f"Everybody would see the name {text}.", f"Give a name: --data NAME={text}.")
    if questions.tasks:
        from node.experiment.harness import require_harness  # noqa: PLC0415

        require_harness()
    follow(run, every, lambda number, parts: _ask(run, questions, number, parts, as_json))


def _ask(run: FollowedRun, questions: Questions, number: int, parts: Sequence[Path], as_json: bool) -> None:
    from node.checkpoint import global_model  # noqa: PLC0415

    model = global_model.read_together(parts, questions.device)
    is_silent = False
    for answer in _answers(model, questions, parts, run.place):
        try:
            for told in answer():
                _show(number, told, as_json)
                if not is_silent:
                    asyncio.run(_tell(run, number, told))
        except FAILURES as error:  # the others may have an answer
            log.warning("round %d: %s", number, error)
            if isinstance(error, HetnodeError):
                is_silent |= error.code is ErrorCode.COORDINATOR_UNREACHABLE


Told = tuple[str, Mapping[str, float], tuple[ModelSample, ...]]
"""A name, its figures and its samples."""


def _answers(
    model: Checkpoint, questions: Questions, parts: Sequence[Path], place: Path
) -> Iterator[Callable[[], Iterator[Told]]]:
    from node.data.tokenizer import find_tokenizer  # noqa: PLC0415
    from node.experiment.evaluate import measured_source  # noqa: PLC0415

    data = model.spec.data
    tokenizer = find_tokenizer(data, place)
    chosen = [(each.name or UNNAMED, measured_source(data, each.name or None)) for each in data.measured]
    if questions.sets:
        given = [named(text) for text in questions.sets]
        chosen = [(name or text, measured_source(data, text)) for name, text in given]
    for name, about in chosen:
        yield partial(_measured, model, questions, name, about, tokenizer)
    yield partial(_sampled, model, questions, tokenizer)
    if questions.tasks:
        yield partial(_tested, model, questions, parts, tokenizer)


def _measured(
    model: Checkpoint, questions: Questions, name: str, about: tuple[DataSource, bool], tokenizer: str | None
) -> Iterator[Told]:
    from node.experiment import evaluate as measuring  # noqa: PLC0415

    source, is_whole = about
    documents = measuring.Documents.ALL if is_whole else questions.documents
    batches = questions.batches or model.spec.data.validation_batches
    how = documents, questions.mode, batches, tokenizer
    found = measuring.evaluate(model, source.source, *how, text_field=source.text_field)
    figures = {"loss": found.loss, "bits_per_byte": found.bits_per_byte}
    yield name, {metric: value for metric, value in figures.items() if math.isfinite(value)}, ()


def _sampled(model: Checkpoint, questions: Questions, tokenizer: str | None) -> Iterator[Told]:
    from node.generate import generate  # noqa: PLC0415

    how = SAMPLE_TOKENS, _TEMPERATURE, _TOP_K, _SEED, tokenizer
    texts = [(prompt, "".join(generate(model, prompt, *how))) for prompt in questions.prompts]
    yield PROMPTS, {}, tuple(ModelSample(_shown(prompt), _shown(text)) for prompt, text in texts)


def _tested(
    model: Checkpoint, questions: Questions, parts: Sequence[Path], tokenizer: str | None
) -> Iterator[Told]:
    from node.checkpoint import global_model  # noqa: PLC0415
    from node.data.tokenizer import check_tokenizer  # noqa: PLC0415
    from node.experiment.harness import run_tasks  # noqa: PLC0415
    from node.hugging_face.export import export  # noqa: PLC0415
    from node.hugging_face.weights import DTYPES  # noqa: PLC0415

    with TemporaryDirectory(prefix="hetnode-eval-") as place:
        whole, folder = parts[0], Path(place, "model")
        if len(parts) > 1:
            whole = Path(place, "checkpoint")
            global_model.assemble(parts, whole)
        export(global_model.verify(whole), folder, DTYPES["fp32"], 1 << 40, tokenizer)
        separator = next(iter(check_tokenizer(model.spec, tokenizer).separator.tolist()), 0)
        found = run_tasks(folder, questions.tasks, str(questions.device), separator)
        for name, figures in found.items():
            yield name, figures, ()


def _shown(text: str) -> str:
    """`text` as the coordinator takes it: lines of printable letters, not too many."""
    return "".join(each if each.isprintable() or each == "\n" else " " for each in text)[:_MOST_LETTERS]


def _show(number: int, told: Told, as_json: bool) -> None:
    name, figures, samples = told
    if as_json:
        texts = [{"prompt": each.prompt, "text": each.text} for each in samples]
        say(json.dumps({"round": number, "name": name, "figures": dict(figures), "samples": texts}))
        return
    found = ", ".join(f"{metric} {value:.4f}" for metric, value in figures.items())
    for text in [found, *(each.prompt + each.text for each in samples)]:
        if text:
            say(f"round {number}  {name}  {text}")


async def _tell(run: FollowedRun, number: int, told: Told) -> None:
    from node.net.coordinator_channel import CoordinatorChannel  # noqa: PLC0415
    from protocol.wire.operator_calls import TellEvaluation  # noqa: PLC0415

    async with CoordinatorChannel(*run.connect()) as channel:
        await channel.ask(TellEvaluation(number, *told), _TELL_SECONDS)
