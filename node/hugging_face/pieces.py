"""SentencePiece models of vocabularies that have none, for llama.cpp's converter.

The converter takes a byte-level BPE only if it knows the hash of its ids, and a BPE with byte fallback not in
the order of its merges. Of a SentencePiece model it takes all, and llama.cpp gives the ids of training.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Mapping
from typing import Any

_BPE = 2
"""SentencePiece's number of this kind of model."""
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
"""Kinds of pieces."""
_SPACE = "\u2581"


def byte_pieces() -> bytes:
    """The model of ByteTokenizer. No text gives the 257th piece, which the SentencePiece library demands."""
    pieces = [(f"<0x{byte:02X}>", 0.0, _BYTE) for byte in range(256)]
    return _model([*pieces, ("<unk>", 0.0, _UNKNOWN)], has_prefix=False)


def pieces_of(definition: Mapping[str, Any]) -> bytes | None:
    """The model with the ids of a ``tokenizer.json``; None if SentencePiece would give others.

    SentencePiece merges any two neighbours that are a piece together, the best piece first.
    """
    model = definition["model"]
    if model["type"] != "BPE" or not model.get("byte_fallback") or not _marks_spaces(definition):
        return None
    merges = [pair if isinstance(pair, list) else pair.split(" ") for pair in model["merges"]]
    texts = list(dict.fromkeys(left + right for left, right in merges))
    scores = {text: -float(rank) for rank, text in enumerate(texts)}
    kinds = {
        each["content"]: _CONTROL if each["special"] else _USER_DEFINED for each in definition["added_tokens"]
    }
    ids = {**model["vocab"], **{each["content"]: each["id"] for each in definition["added_tokens"]}}
    kinds |= {name: _BYTE for name in ids if re.fullmatch("<0x[0-9A-F]{2}>", name)}
    kinds |= {model["unk_token"]: _UNKNOWN} if model.get("unk_token") in ids else {}
    known = {name for name in ids if name not in kinds}
    wanted = [text for text in known for left, right in _splits(text) if left in known and right in known]
    is_whole = sorted(ids.values()) == list(range(len(ids))) and _UNKNOWN in kinds.values()
    if not is_whole or sorted(wanted) != sorted(left + right for left, right in merges):
        return None
    names = sorted(ids, key=lambda name: ids[name])
    return _model(
        ((name, scores.get(name, 0.0), kinds.get(name, _NORMAL)) for name in names), has_prefix(definition)
    )


def has_prefix(definition: Mapping[str, Any]) -> bool:
    """Whether a ``tokenizer.json`` puts a space before a text."""
    return any(
        step.get("prepend") or step.get("prepend_scheme", "never") != "never" for step in _steps(definition)
    )


def _marks_spaces(definition: Mapping[str, Any]) -> bool:
    """Whether a text is only changed as SentencePiece does it, and is not cut before the merges."""
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    steps = [step for step in _steps(definition) if step != {"type": "Prepend", "prepend": _SPACE}]
    is_cut = any(step.get("split", True) for step in steps if step["type"] == "Metaspace")
    return [replace] == steps or ([step["type"] for step in steps] == ["Metaspace"] and not is_cut)


def _steps(definition: Mapping[str, Any]) -> list[dict[str, Any]]:
    parts = [definition.get("normalizer"), definition.get("pre_tokenizer")]
    lists = [part.get("normalizers") or part.get("pretokenizers") or [part] for part in parts if part]
    return [step for steps in lists for step in steps]


def _splits(text: str) -> list[tuple[str, str]]:
    return [(text[:at], text[at:]) for at in range(1, len(text))]


def _model(pieces: Iterable[tuple[str, float, int]], has_prefix: bool) -> bytes:
    """The model of these pieces: text, score and kind of each."""
    parts = [
        _field(1, _field(1, name.encode()) + b"\x15" + struct.pack("<f", score) + _field(3, kind))
        for name, score, kind in pieces
    ]
    trainer = _field(3, _BPE) + _field(35, True)  # byte_fallback
    normalizer = _field(1, b"identity") + _field(3, has_prefix) + _field(4, False)  # extra spaces stay
    return b"".join(parts) + _field(2, trainer) + _field(3, normalizer)


def _field(number: int, value: bytes | int) -> bytes:
    """A field of a protobuf message."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    low, high = value & 0x7F, value >> 7
    return bytes([low | 0x80]) + _varint(high) if high else bytes([low])
