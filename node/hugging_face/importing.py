"""The start of a run from the Hugging Face folder of a Llama model.

The folder is not trusted: names, dtypes, shapes and sizes are checked before a weight is read. Pickled
weights are never read. The output::

    run.toml            the run's specification, with the digest of each stage before round 1
    checkpoint/         these parameters, as a checkpoint after round 0
    tokenizer.json      the run's tokenizer, unless it is the byte tokenizer; tokenizer_config.json beside it
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from node.checkpoint import global_model
from node.checkpoint.files import publish, write_bytes, write_text
from node.checkpoint.global_model import Checkpoint
from node.core.model.shapes import parameter_shapes
from node.data.declared import BASE_MODEL, CONFIG_FILE, as_file, declared_beside
from node.data.tokenizer import SENTENCEPIECE_FILE, TOKENIZER_FILE, FileTokenizer, load_tokenizer
from node.folder import disk_errors_reported
from node.hugging_face.architecture import model_of, output_biases, published_name, unsupported
from node.hugging_face.pieces import byte_pieces
from node.hugging_face.tokenizer import byte_definition
from node.hugging_face.weights import Weights, read_json
from protocol.errors import ErrorCode, HetnodeError
from protocol.math.outer_step import anchor_digest
from protocol.run_files.resolve import resolve, to_toml
from protocol.spec.run import RunSpec
from protocol.spec.sections import ModelSpec

MOST_CONTEXT = 2048
"""Default limit of the context: many models declare far more than they were trained on."""

PRETRAINED_RATE = 1e-4
"""Learning rate of a run that starts from a model which has learned already. Those of presets, up to 3e-3,
are for a beginning: they undo in a few steps what a model has learned. Trainings end from 1e-5 to 3e-4."""

RUN_FILE = "run.toml"
_EMBEDDING, _HEAD = (published_name(name, ModelSpec()) for name in ("emb", "head"))
TOKENIZER_LIMIT = 256 << 20


@dataclass(frozen=True)
class Published:
    """The model that a Hugging Face folder declares.

    Attributes:
        model: the fields of `ModelSpec`.
        tied: its head is its embedding. Without `model.tied_head` a run trains a copy of it as its head.
        output_bias: its attention has a bias of the output, too, which must be zero.
        end: id of its end-of-text token; None if it declares none.
        context: tokens that it declares to see.
        base: its name on the hub; None if the folder does not tell.
    """

    folder: Path
    model: Mapping[str, Any]
    tied: bool
    output_bias: bool
    end: int | None
    context: int
    base: str | None


def inspect(folder: Path, context: int | None = None) -> Published:
    """Read ``config.json``. Without `context`, that of the model is taken, at most MOST_CONTEXT.

    Raises HetnodeError UNSUPPORTED_MODEL.
    """
    path = folder / "config.json"
    config = read_json(path)
    longest = config.get("max_position_embeddings", MOST_CONTEXT)
    if type(longest) is not int:
        raise unsupported(path, f"max_position_embeddings is {longest!r:.40}")
    model, tied = model_of(config, context or min(longest, MOST_CONTEXT), path)
    has_output_bias = config["model_type"] != "qwen2" and model["qkv_bias"]
    ends = config.get("eos_token_id")
    end = ends[0] if isinstance(ends, list) and ends else ends  # of several, the first ends a document
    declared_end = end if type(end) is int else None
    base = _hub_name(folder, config.get("_name_or_path"))
    return Published(folder, model, tied, has_output_bias, declared_end, longest, base)


def _hub_name(folder: Path, saved_as: object) -> str | None:
    """The name on the hub, from the place in the hub's cache or from what transformers noted at a save."""
    for part in folder.absolute().parts:
        if cached := re.fullmatch(r"models--([\w.-]+)--([\w.-]+)", part):
            return f"{cached[1]}/{cached[2]}"
    is_name = isinstance(saved_as, str) and re.fullmatch(r"\w[\w.-]{0,95}/[\w.-]{1,96}", saved_as)
    return str(saved_as) if is_name and not Path(str(saved_as)).exists() else None


def tokenizer_of(published: Published) -> FileTokenizer | None:
    """The folder's tokenizer; None if it is the byte tokenizer, which a run names "byte".

    Its end-of-text token is the one that the model declares.

    Raises HetnodeError TOKENIZER_UNREADABLE.
    """
    path = published.folder / TOKENIZER_FILE
    if not path.exists() and (model := published.folder / SENTENCEPIECE_FILE).exists():
        path = model
    try:
        with path.open("rb") as file:
            content = file.read(TOKENIZER_LIMIT + 1)
        if len(content) > TOKENIZER_LIMIT:
            raise ValueError(f"it is larger than {TOKENIZER_LIMIT} bytes")
        if content in (byte_definition().encode(), byte_pieces()):
            return None
        found = FileTokenizer(content)
        declared = found.token(published.end) if published.end is not None else None
        return found if declared in (None, found.end) else FileTokenizer(content, declared or "")
    except (OSError, ValueError) as error:
        raise HetnodeError(
            ErrorCode.TOKENIZER_UNREADABLE,
            f"The tokenizer {path} cannot be read: {error}.",
            "Give --set data.tokenizer=PATH with the model's tokenizer.json, or --set data.tokenizer=byte.",
        ) from None


def named_end(tokenizer: FileTokenizer) -> dict[str, object]:
    """The setting for an end-of-text token that a tokenizer's file alone does not tell."""
    is_usual = tokenizer.end is None or [tokenizer.end] == tokenizer.usual_ends[:1]
    return {} if is_usual else {"data.end_token": tokenizer.end}


def import_model(published: Published, spec: RunSpec, out: Path, tokenizer: str | None = None) -> RunSpec:
    """Write the start of a run from the model to `out`, a new or empty folder.

    Memory stays near the largest stage.

    Args:
        spec: of the new run, with the model of `published`. If it has `initial`, the digests must be equal.
        tokenizer: its file, copied to `out` with what is declared beside it. `spec` names its content.

    Returns:
        The run's specification with `initial`.

    Raises:
        HetnodeError: UNSUPPORTED_MODEL; INITIAL_UNAVAILABLE if the run starts from other parameters;
            BAD_OPTION if `out` is not empty or cannot be written; DISK_FULL. `out` is unchanged then.
    """
    require_empty(out)
    read = _stage_reader(published, spec)
    stages = range(spec.swarm.stages)
    digests = tuple(anchor_digest(read(stage)) for stage in stages)
    if spec.initial not in (None, digests):
        raise HetnodeError(
            ErrorCode.INITIAL_UNAVAILABLE,
            f"The model in {published.folder} is not the one from which run {spec.name} starts.",
            "Use the revision of the model with which the run was created.",
        )
    started = RunSpec.model_validate({**spec.model_dump(), "initial": digests})
    kept = _tokenizer_files(published, spec, tokenizer) if tokenizer else {}

    def fill(partial: Path) -> None:
        anchors = ((stage, read(stage)) for stage in stages)
        global_model.write(partial / "checkpoint", started, 0, anchors)
        for name, content in kept.items():
            write_bytes(partial / name, content)
        write_text(partial / RUN_FILE, to_toml(started))

    with disk_errors_reported(out):
        publish(out.resolve(), fill)
    return started


def _tokenizer_files(published: Published, spec: RunSpec, file: str) -> dict[str, bytes]:
    tokenizer = load_tokenizer(spec.data, file)
    assert isinstance(tokenizer, FileTokenizer)
    base = {BASE_MODEL: published.base} if published.base else {}
    declared = declared_beside(Path(os.path.expanduser(file)), tokenizer) | base
    return {tokenizer.file_name: tokenizer.content, CONFIG_FILE: as_file(declared)}


def read_model(published: Published, spec: RunSpec, device: torch.device | str = "cpu") -> Checkpoint:
    """The model in memory, as a checkpoint of `spec`, which has the model of `published`.

    Raises HetnodeError UNSUPPORTED_MODEL.
    """
    read = _stage_reader(published, spec)
    stages = {
        stage: {name: tensor.to(device) for name, tensor in read(stage).items()}
        for stage in range(spec.swarm.stages)
    }
    return Checkpoint(spec, 0, stages)


def as_checkpoint(place: Path, device: torch.device | str = "cpu") -> Checkpoint:
    """The model of a Hugging Face folder in memory, as if it were that of a run of one stage.

    Raises HetnodeError UNSUPPORTED_MODEL, TOKENIZER_UNREADABLE.
    """
    published = inspect(place)
    kept = tokenizer_of(published)
    tokenizer = str(place / kept.file_name) if kept else None
    shape = {"swarm.replicas": 1, "swarm.pipelines": 0, "swarm.stages": 1, "link.k": 0}
    model = {f"model.{name}": value for name, value in published.model.items()}
    model["model.tied_head"] = published.tied
    end = named_end(kept) if kept else {}
    spec = resolve(overrides={"data.tokenizer": tokenizer} | end | shape | model)
    return read_model(published, spec, device)


def require_empty(out: Path) -> None:
    """Raise HetnodeError BAD_OPTION unless `out` is missing or an empty folder."""
    with disk_errors_reported(out):
        is_free = not out.exists() or (out.is_dir() and not any(out.iterdir()))
    if not is_free:
        raise HetnodeError(
            ErrorCode.BAD_OPTION, f"{out} exists and is not empty.", "Name a folder that does not exist yet."
        )


def _stage_reader(published: Published, spec: RunSpec) -> Callable[[int], dict[str, Tensor]]:
    """A function that reads the parameters of a stage. Names, dtypes and shapes are checked here, before."""
    model = spec.model
    of_stage = [parameter_shapes(spec, stage) for stage in range(spec.swarm.stages)]
    expected = {published_name(name, model): shape for shapes in of_stage for name, shape in shapes.items()}
    if published.tied:
        expected.pop(_HEAD, None)
    elif model.tied_head:
        raise unsupported(published.folder, "its head is not its embedding, as model.tied_head says")
    zero = output_biases(model) if published.output_bias else []
    expected |= dict.fromkeys(zero, (model.width,))
    weights = Weights(published.folder, expected, ignored=[_HEAD] if published.tied else [])
    for name in zero:
        if weights.read(name).any():
            raise unsupported(published.folder, f"{name} is not zero")

    def source(name: str) -> str:
        theirs = published_name(name, model)
        return _EMBEDDING if published.tied and theirs == _HEAD else theirs

    return lambda stage: {name: weights.read(source(name)) for name in of_stage[stage]}
