"""Tokenizers that a matrix defines: byte-level BPE, trained on the training text of its data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from node.data.sources import open_source
from node.data.tokenizer import FileTokenizer
from node.extras import Extra, needed
from protocol.errors import ErrorCode, HetnodeError
from protocol.trust.private_file import write_whole

END_OF_TEXT, END_OF_TEXT_ID = "<|endoftext|>", 0


@dataclass(frozen=True)
class TokenizerFile:
    """A tokenizer.json and its hash."""

    path: Path
    sha256: str
    vocabulary: int


def tokenizer_file(path: Path) -> TokenizerFile:
    """The tokenizer in the existing file `path`. Raises TOKENIZER_UNREADABLE or MISSING_EXTRA."""
    try:
        tokenizer = FileTokenizer(path.read_bytes())
    except (OSError, ValueError) as error:
        raise HetnodeError(
            ErrorCode.TOKENIZER_UNREADABLE,
            f"The tokenizer {path} cannot be read: {error}.",
            "Remove the file; the tokenizer is trained again. Results of trials with another tokenizer are "
            "then not used.",
        ) from None
    return TokenizerFile(path, tokenizer.sha256, tokenizer.vocabulary)


def train_bpe(path: Path, vocabulary: int, source: str, text_field: str) -> TokenizerFile:
    """Train a tokenizer of `vocabulary` ids on the training documents of `source`, and write it to `path`.

    The same text gives the same file.

    Raises:
        HetnodeError: DATA_UNREADABLE; MISSING_EXTRA; BAD_MATRIX if the text is too short for this many ids.
        OSError: the file cannot be written.
    """
    with needed(Extra.HF):
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: PLC0415
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    documents = open_source(source, text_field).documents()
    # The library refuses lone surrogates.
    texts = (each.text.encode(errors="replace").decode() for each in documents if not each.held_out)
    inner.train_from_iterator(texts, trainer)
    if inner.get_vocab_size() != vocabulary:
        raise HetnodeError(
            ErrorCode.BAD_MATRIX,
            f"The tokenizer {path.stem} needs {vocabulary} ids, but the text of {source} gives only "
            f"{inner.get_vocab_size()}.",
            "Give it a smaller vocabulary, or more text.",
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, inner.to_str())
    return tokenizer_file(path)
