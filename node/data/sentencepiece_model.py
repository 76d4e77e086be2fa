"""SentencePiece models (``tokenizer.model`` of Llama 2 and Mistral) as definitions of the tokenizers library.

The definition gives the ids of the sentencepiece library (Kudo and Richardson, arXiv 1808.06226), so that a
run, its export and its evaluation have one tokenizer.
"""

from __future__ import annotations

import base64
import json
from typing import Any

from node.extras import Extra, needed

_BPE = 2
_NORMAL, _UNKNOWN, _USER_DEFINED = 1, 2, 4
"""Types of pieces. No merge makes those of other types: control symbols and bytes."""
_SPACE = "\u2581"
"""The visible mark that stands for a space in pieces."""


def definition_of(model: bytes) -> str:
    """The ``tokenizer.json`` of a SentencePiece model.

    Control symbols such as ``</s>`` have ids, but no text gives them.

    Raises:
        ValueError: `model` is no SentencePiece model, or of a kind other than BPE with spaces before words
            and without user-defined symbols.
        HetnodeError: MISSING_EXTRA.
    """
    with needed(Extra.HF):
        from google.protobuf.message import DecodeError  # noqa: PLC0415
        from sentencepiece import sentencepiece_model_pb2  # noqa: PLC0415
    parsed: Any = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
    try:
        parsed.ParseFromString(model)
    except DecodeError:
        raise ValueError("it is neither a tokenizer.json nor a SentencePiece model") from None
    if not parsed.pieces:
        raise ValueError("it is neither a tokenizer.json nor a SentencePiece model with pieces")
    trainer, normalizer = parsed.trainer_spec, parsed.normalizer_spec
    if trainer.model_type != _BPE:
        raise ValueError("it is a SentencePiece model of another kind than BPE")
    if trainer.treat_whitespace_as_suffix or not normalizer.escape_whitespaces:
        raise ValueError("it is a SentencePiece model that does not mark the spaces before words")
    if any(piece.type == _USER_DEFINED for piece in parsed.pieces):
        raise ValueError("it is a SentencePiece model with user-defined symbols")
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [],
            "normalizer": _normalizer(normalizer),
            "pre_tokenizer": None,
            "post_processor": None,
            "decoder": _decoder(normalizer.add_dummy_prefix),
            "model": _bpe(parsed.pieces, trainer.byte_fallback),
        },
        ensure_ascii=False,
    )


def _bpe(pieces: Any, byte_fallback: bool) -> dict[str, Any]:
    ids = {piece.piece: number for number, piece in enumerate(pieces)}
    if len(ids) != len(pieces):
        raise ValueError("two pieces of the SentencePiece model are the same")
    merged = [piece for piece in pieces if piece.type == _NORMAL]
    known = {piece.piece for piece in merged}
    merges = [
        (-piece.score, ids[left], ids[right], left, right)
        for piece in merged
        for left, right in _splits(piece.piece)
        if left in known and right in known
    ]
    unknown = [piece.piece for piece in pieces if piece.type == _UNKNOWN]
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown[0] if unknown else None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": byte_fallback,
        "ignore_merges": False,
        "vocab": ids,
        # The library merges the pair that comes first here; SentencePiece the one of the highest score.
        "merges": [[left, right] for *_, left, right in sorted(merges)],
    }


def _splits(piece: str) -> list[tuple[str, str]]:
    return [(piece[:at], piece[at:]) for at in range(1, len(piece))]


def _normalizer(spec: Any) -> dict[str, Any]:
    steps: list[dict[str, Any]] = []
    if spec.precompiled_charsmap:
        table = base64.b64encode(spec.precompiled_charsmap).decode()
        steps.append({"type": "Precompiled", "precompiled_charsmap": table})
    if spec.remove_extra_whitespaces:
        steps.append({"type": "Strip", "strip_left": True, "strip_right": True})
        steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    if spec.add_dummy_prefix:
        steps.append({"type": "Prepend", "prepend": _SPACE})
    steps.append({"type": "Replace", "pattern": {"String": " "}, "content": _SPACE})
    return {"type": "Sequence", "normalizers": steps}


def _decoder(has_prefix: bool) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if has_prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": steps}
