"""SentencePiece models for tests, trained on two modules of the interpreter's library."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import sentencepiece

# Those of Llama 2 and Mistral.
_LLAMA = {
    "model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity", "split_digits": True,
    "add_dummy_prefix": True, "remove_extra_whitespaces": False, "allow_whitespace_only_pieces": True,
    "unk_id": 0, "bos_id": 1, "eos_id": 2, "pad_id": -1,
}  # fmt: skip
TEXT = "".join(Path(module.__file__ or "").read_text() for module in (io, random))


def trained(**options: Any) -> bytes:
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.splitlines()),
        model_writer=written,
        minloglevel=2,
        hard_vocab_limit=False,
        **{"vocab_size": 600, "character_coverage": 0.99, **_LLAMA, **options},
    )
    return written.getvalue()
