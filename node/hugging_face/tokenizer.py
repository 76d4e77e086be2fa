"""The tokenizer files of a Hugging Face folder, for transformers and for llama.cpp's converter."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from node.data.declared import CONFIG_FILE
from node.data.tokenizer import SENTENCEPIECE_FILE, TOKENIZER_FILE, ByteTokenizer, FileTokenizer
from node.extras import Extra, needed
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


def byte_pieces() -> bytes:
    """The ``tokenizer.model`` of ByteTokenizer, because llama.cpp reads no byte-level BPE without merges.

    The 257th piece, for unknown text, is one that the SentencePiece library demands; no text gives it.
    """
    pieces = [(f"<0x{byte:02X}>", _BYTE) for byte in range(256)] + [("<unk>", _UNKNOWN)]
    parts = [_field(1, _field(1, name.encode()) + _field(3, kind)) for name, kind in pieces]
    trainer = _field(3, _BPE) + _field(35, True)  # byte_fallback
    normalizer = _field(1, b"identity") + _field(3, False) + _field(4, False)  # it adds and removes no spaces
    return b"".join(parts) + _field(2, trainer) + _field(3, normalizer)


_BPE, _UNKNOWN, _BYTE = 2, 2, 6
"""SentencePiece's number of the kind of model, and those of kinds of pieces."""


def _field(number: int, value: bytes | int) -> bytes:
    """A field of a protobuf message."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    low, high = value & 0x7F, value >> 7
    return bytes([low | 0x80]) + _varint(high) if high else bytes([low])


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
    if isinstance(tokenizer, FileTokenizer):
        definition = _without_additions(tokenizer.definition)
        if tokenizer.file_name == SENTENCEPIECE_FILE:
            pieces = {SENTENCEPIECE_FILE: tokenizer.content}
    else:
        definition = byte_definition()
        if not model.qk_norm:  # llama.cpp's converter would have a Qwen3's text begin with a space
            # SentencePiece writes a space as another character. A token that users add stands for itself.
            pieces = {SENTENCEPIECE_FILE: byte_pieces(), ADDED_FILE: _json({" ": ord(" ")})}
            # So transformers does not read the other file. Its spaces are in tokenizer.json.
            config |= {"add_prefix_space": False, "added_tokens_decoder": {}}
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
