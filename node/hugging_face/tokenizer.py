"""The tokenizer files of a Hugging Face folder: ``tokenizer.json`` and ``tokenizer_config.json``."""

from __future__ import annotations

import json
from typing import Any

from node.data.tokenizer import SENTENCEPIECE_FILE, TOKENIZER_FILE, ByteTokenizer, FileTokenizer
from node.extras import Extra, needed

TokenizerFiles = dict[str, bytes]


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


def tokenizer_files(tokenizer: ByteTokenizer | FileTokenizer, context: int) -> TokenizerFiles:
    """The contents of a model's tokenizer files by file name.

    ``tokenizer.json`` is the run's own without adding special tokens, because training has none. A
    SentencePiece model lies beside it.
    """
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }
    special: dict[str, str] = {}
    model: TokenizerFiles = {}
    if isinstance(tokenizer, ByteTokenizer):
        definition = byte_definition()
    else:
        definition = _without_additions(tokenizer.definition)
        if tokenizer.end is not None:
            special = {"bos_token": tokenizer.end, "eos_token": tokenizer.end}
        if tokenizer.file_name == SENTENCEPIECE_FILE:
            model = {SENTENCEPIECE_FILE: tokenizer.content}
    return {
        TOKENIZER_FILE: definition.encode(),
        "tokenizer_config.json": _json(config | special),
        "special_tokens_map.json": _json(special),
        **model,
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
