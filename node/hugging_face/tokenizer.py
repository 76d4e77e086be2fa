"""The tokenizer files of a Hugging Face folder, for transformers and for llama.cpp's converter."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from node.data.declared import CONFIG_FILE
from node.data.tokenizer import SENTENCEPIECE_FILE, TOKENIZER_FILE, ByteTokenizer, FileTokenizer
from node.extras import Extra, needed
from node.hugging_face.pieces import byte_pieces, has_prefix, pieces_of
from protocol.spec.sections import ModelSpec

TokenizerFiles = dict[str, bytes]
ADDED_FILE = "added_tokens.json"
SPECIAL = ("bos_token", "eos_token", "pad_token")


def byte_definition() -> str:
    """The ``tokenizer.json`` that is equal to ByteTokenizer: the ids are the UTF-8 bytes of the text.

    It is a byte-level BPE without merges and without special tokens, written as the library writes it.
    """
    level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    definition: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": level | {"add_prefix_space": False, "use_regex": False},
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {mark: byte for byte, mark in sorted(_marks().items())},
            "merges": [],
        },
    }
    return json.dumps(definition, ensure_ascii=False, indent=2)


def tokenizer_files(
    tokenizer: ByteTokenizer | FileTokenizer, declared: Mapping[str, Any], model: ModelSpec
) -> TokenizerFiles:
    """The contents of a model's tokenizer files by file name.

    ``tokenizer.json`` is the run's own without adding special tokens, because training has none. A
    SentencePiece model lies beside it. llama.cpp's converter reads that, if there is one.

    Args:
        declared: the model's special tokens and chat template, as in ``tokenizer_config.json``.
    """
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.context,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "add_eos_token": False,
    }
    pieces: TokenizerFiles = {}
    if isinstance(tokenizer, ByteTokenizer):
        definition = byte_definition()
        # SentencePiece writes a space as another character. A token that users add stands for itself.
        pieces = {SENTENCEPIECE_FILE: byte_pieces(), ADDED_FILE: _json({" ": ord(" ")})}
        config["added_tokens_decoder"] = {}  # so transformers does not read the other file
    else:
        definition = _without_additions(tokenizer.definition)
        is_sentencepiece = tokenizer.file_name == SENTENCEPIECE_FILE
        found = tokenizer.content if is_sentencepiece else pieces_of(json.loads(definition))
        pieces = {SENTENCEPIECE_FILE: found} if found else {}
    if model.norms == "outputs":  # of an OLMo2 the converter reads none
        pieces = {}
    if pieces and not has_prefix(json.loads(definition)):
        config["add_prefix_space"] = False
        if model.qk_norm:  # of a Qwen3 the converter does not read that
            pieces = {}
    return {
        TOKENIZER_FILE: definition.encode(),
        CONFIG_FILE: _json({**config, **declared}),
        "special_tokens_map.json": _json({key: declared[key] for key in SPECIAL if key in declared}),
        **pieces,
    }


def _without_additions(definition: str) -> str:
    """`definition` without padding, truncation and special tokens around a text."""
    with needed(Extra.HF):
        from tokenizers import Tokenizer  # noqa: PLC0415
    tree = json.loads(definition)
    adds = Tokenizer.from_str(definition).num_special_tokens_to_add(is_pair=False) > 0
    unwanted = [name for name in ("padding", "truncation") if tree.get(name)]
    unwanted += ["post_processor"] if adds else []
    if not unwanted:
        return definition
    return json.dumps(tree | dict.fromkeys(unwanted), ensure_ascii=False, indent=2)


def _marks() -> dict[int, str]:
    """The character for each byte in byte-level vocabularies (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + index) for index, byte in enumerate(others)
    }


def _json(tree: dict[str, Any]) -> bytes:
    return (json.dumps(tree, ensure_ascii=False, indent=2) + "\n").encode()
