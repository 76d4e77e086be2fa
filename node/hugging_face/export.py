"""A checkpoint as a complete Hugging Face folder, which transformers loads without remote code.

==============================  ==================================================================
config.json                     a Llama, Qwen3, SmolLM3 or OLMo2 (node.hugging_face.architecture)
generation_config.json          the end token, and ids that are never generated
model*.safetensors              weights; several files with an index if they exceed the size of a shard
tokenizer.json ...              a tokenizer with the run's ids
README.md                       the model card
hetnode_run.json                specification, digests and measurements of the run
==============================  ==================================================================

The folder appears complete or not at all. It contains no path of this machine.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PureWindowsPath
from typing import Any

import torch
from torch import Tensor

from node.checkpoint.files import Shapes, publish, write_bytes
from node.checkpoint.global_model import MANIFEST_FILE, Verified, require_complete
from node.core.model.shapes import parameter_shapes
from node.data.declared import BASE_MODEL, declared_beside
from node.data.places import with_places
from node.data.sources import names_files
from node.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer, check_tokenizer
from node.folder import disk_errors_reported
from node.hugging_face.architecture import config_of, output_biases, published_name
from node.hugging_face.card import LOCAL, CardFacts, Measured, card
from node.hugging_face.tokenizer import ADDED_FILE, SPECIAL, tokenizer_files
from node.hugging_face.weights import INDEX, SINGLE, Dtype, write_weights
from protocol.errors import ErrorCode, HetnodeError
from protocol.spec.data import DataSpec
from protocol.spec.run import RunSpec

RUN_RECORD = "hetnode_run.json"
_WRITTEN = re.compile(
    r"config\.json|generation_config\.json|tokenizer\.(json|model)|tokenizer_config\.json|special_tokens_map\.json"
    rf"|{re.escape(ADDED_FILE)}"
    rf"|README\.md|{re.escape(RUN_RECORD)}|{re.escape(SINGLE)}|{re.escape(INDEX)}"
    r"|model-\d{5}-of-\d{5}\.safetensors"
)


NOTHING_MEASURED = Measured({}, 0)


def export(
    stored: Verified,
    folder: Path,
    dtype: Dtype,
    shard_bytes: int,
    tokenizer_path: str | None = None,
    measured: Measured = NOTHING_MEASURED,
) -> None:
    """Write the model of a checkpoint as the Hugging Face folder `folder`.

    An earlier export at `folder` is replaced. Memory stays near the largest tensor.

    Args:
        stored: all stages of a run.
        shard_bytes: largest size of a weight file; a larger tensor has its own file.
        tokenizer_path: the run's tokenizer.json on this machine, if its path differs from the spec.

    Raises:
        HetnodeError: CHECKPOINT_MISSING (stages), CHECKPOINT_CORRUPT, TOKENIZER_UNREADABLE,
            TOKENIZER_MISMATCH; UNSUPPORTED_MODEL; BAD_OPTION if `folder` is something else or cannot be
            written, or if `dtype` cannot represent a weight; DISK_FULL. `folder` is unchanged then.
    """
    require_complete(stored)
    with disk_errors_reported(folder):
        _require_replaceable(folder)
    spec = stored.spec
    tokenizer = check_tokenizer(spec, tokenizer_path)
    assert isinstance(tokenizer, ByteTokenizer | FileTokenizer)
    declared = _declared(tokenizer, Path(os.path.expanduser(tokenizer_path or spec.data.tokenizer)))
    base = declared.pop(BASE_MODEL, None)
    ids = _special_ids(tokenizer, declared)
    public = spec_without_folders(spec)
    data = DataSpec.model_validate(public["data"])
    facts = CardFacts(spec, data, stored.round_number, dtype.name, measured, base if spec.initial else None)
    texts = {
        "config.json": _json(config_of(spec.model, dtype.name, ids["eos_token_id"]) | ids),
        "generation_config.json": _json(_generation(spec, tokenizer, ids)),
        RUN_RECORD: _json(_record(stored, facts, public)),
        "README.md": card(facts),
    }
    files = {name: text.encode() for name, text in texts.items()}
    files |= tokenizer_files(tokenizer, declared, spec.model)

    def fill(partial: Path) -> None:
        write_weights(partial, _published_shapes(spec), _published(stored), dtype, shard_bytes)
        for name, content in files.items():
            write_bytes(partial / name, content)

    with disk_errors_reported(folder):
        publish(folder.resolve(), fill)


def spec_without_folders(spec: RunSpec) -> dict[str, Any]:
    """The specification as JSON, with file names in place of paths, which are valid on one machine only.

    The name of a folder is not told at all: nobody else can find the data by it.
    """
    tree = spec.tree
    data = tree["data"] = with_places(tree["data"], _without_folder)
    data["tokenizer"] = PureWindowsPath(data["tokenizer"]).name
    return tree


def _without_folder(source: str, name: str) -> str:
    kind, _, rest = source.partition(":")
    rest, mark, sha256 = rest.partition("#") if kind == "shards" else (rest, "", "")
    if "://" in rest or (not names_files(source) and "\\" not in rest):
        return source
    # Windows paths, because they allow both separators: the run file may come from another system.
    path = PureWindowsPath(rest)
    is_file = kind != "hf" and path.suffix and not Path(os.path.expanduser(rest)).is_dir()
    # Files of one name in two folders stay two sources.
    folder = f"./{name}/" if name else ""
    return f"{kind}:{folder}{path.name if is_file else LOCAL}{mark}{sha256}"


def _published_shapes(spec: RunSpec) -> Shapes:
    stages = range(spec.swarm.stages)
    shapes = (item for stage in stages for item in parameter_shapes(spec, stage).items())
    biases = dict.fromkeys(output_biases(spec.model), (spec.model.width,))
    return {published_name(name, spec.model): shape for name, shape in shapes} | biases


def _published(stored: Verified) -> Iterator[tuple[str, Tensor]]:
    for stage in range(stored.spec.swarm.stages):
        for name, tensor in stored.tensors(stage):
            yield published_name(name, stored.spec.model), tensor
    for name in output_biases(stored.spec.model):
        yield name, torch.zeros(stored.spec.model.width)


def _declared(tokenizer: ByteTokenizer | FileTokenizer, file: Path) -> dict[str, Any]:
    """The special tokens and the chat template; the end-of-text token is that of training."""
    if isinstance(tokenizer, ByteTokenizer):
        return {}
    end = {} if tokenizer.end is None else {"eos_token": tokenizer.end}
    begin = {"bos_token": tokenizer.end} if end else {}
    return begin | declared_beside(file, tokenizer) | end


def _special_ids(
    tokenizer: ByteTokenizer | FileTokenizer, declared: Mapping[str, Any]
) -> dict[str, int | None]:
    ids: dict[str, int | None] = dict.fromkeys((f"{name}_id" for name in SPECIAL), None)
    if isinstance(tokenizer, FileTokenizer):
        ids |= {f"{name}_id": tokenizer.number(declared[name]) for name in SPECIAL if name in declared}
    return ids


def _generation(spec: RunSpec, tokenizer: Tokenizer, ids: Mapping[str, int | None]) -> dict[str, Any]:
    end = ids["eos_token_id"]
    config: dict[str, Any] = {
        **ids,
        "pad_token_id": end if ids["pad_token_id"] is None else ids["pad_token_id"],
    }
    # Rows of the embedding without an id of the tokenizer were never trained.
    if untrained := list(range(tokenizer.vocabulary, spec.model.vocabulary)):
        config["suppress_tokens"] = untrained
    return {name: value for name, value in config.items() if value is not None}


def _record(stored: Verified, facts: CardFacts, public: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "format": 1,
        "run_id": facts.spec.name,
        "spec_hash": facts.spec.hash,
        "round": facts.round_number,
        "anchor_digests": {
            str(stage): entry.anchor_digest for stage, entry in sorted(stored.manifest.stages.items())
        },
        "manifest_checksum": MANIFEST_FILE.checksum(stored.manifest),
        "dtype": facts.dtype,
        "tokens": facts.measured.tokens or None,
        "validation_loss": {str(replica): loss for replica, loss in facts.measured.losses.items()},
        "spec": public,
    }


def _require_replaceable(folder: Path) -> None:
    """Raise BAD_OPTION unless `folder` is missing, empty, or an earlier export without other files."""
    if not folder.exists():
        return
    found = [path.name for path in folder.iterdir()] if folder.is_dir() else [folder.name]
    foreign = [name for name in found if not folder.is_dir() or not _WRITTEN.fullmatch(name)]
    if foreign or (found and RUN_RECORD not in found):
        raise HetnodeError(
            ErrorCode.BAD_OPTION,
            f"{folder} exists, and is not an earlier export without other files.",
            "Name a folder that does not exist yet; nothing was changed.",
        )


def _json(tree: Mapping[str, Any]) -> str:
    return json.dumps(tree, ensure_ascii=False, indent=2) + "\n"
