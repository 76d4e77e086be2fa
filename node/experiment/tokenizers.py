"""Tokenizers that a matrix asks for: byte-level BPE, trained on the training text of its data."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from node.data.sources import open_source
from protocol.errors import ErrorCode, HetnodeError

END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True)
class TokenizerFile:
    """A tokenizer.json and its hash."""

    path: Path
    sha256: str
    vocabulary: int


def tokenizer_file(path: Path) -> TokenizerFile:
    """One that is there. Raises OSError or ValueError."""
    definition = path.read_bytes()
    try:
        inner = tokenizers.Tokenizer.from_str(definition.decode())
    except Exception as error:  # the library raises bare Exception
        raise ValueError(str(error)) from None
    vocabulary = max(inner.get_vocab(with_added_tokens=True).values()) + 1
    return TokenizerFile(path, hashlib.sha256(definition).hexdigest(), vocabulary)


def train_bpe(path: Path, vocabulary: int, source: str, text_field: str) -> TokenizerFile:
    """Train a tokenizer of `vocabulary` ids on the training documents of `source`, and write it to `path`.

    The same text gives the same file.

    Raises:
        HetnodeError: DATA_UNREADABLE; BAD_MATRIX if the text is too short for this many ids.
        OSError: the file cannot be written.
    """
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator(_training_texts(source, text_field), trainer)
    if inner.get_vocab_size() != vocabulary:
        raise HetnodeError(
            ErrorCode.BAD_MATRIX,
            f"The tokenizer {path.stem} is to have {vocabulary} ids, and the text of {source} gives only "
            f"{inner.get_vocab_size()}.",
            "Give it a smaller vocabulary, or more text.",
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}")
    partial.write_text(inner.to_str(), encoding="utf-8")
    os.replace(partial, path)
    return tokenizer_file(path)


def _training_texts(source: str, text_field: str) -> Iterator[str]:
    for document in open_source(source, text_field).documents():
        if not document.held_out:
            yield document.text.encode(errors="replace").decode()
