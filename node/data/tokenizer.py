"""Text to token ids and back: raw bytes, any ``tokenizer.json``, or a SentencePiece ``tokenizer.model``."""

from __future__ import annotations

import hashlib
import logging
import os
from codecs import BOM_UTF8
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from node.data.sentencepiece_model import definition_of
from node.data.skipping import LeftOut
from node.extras import Extra, needed
from protocol.errors import ErrorCode, HetnodeError
from protocol.spec.data import DataSpec
from protocol.spec.run import RunSpec

if TYPE_CHECKING:
    from tokenizers import Encoding

log = logging.getLogger(__name__)

Tokens = np.ndarray[tuple[int], np.dtype[np.int32]]

BYTES = "byte"
"""The tokenizer without a file, as the specification names it."""
_EARLY_TEXTS = 100
"""Of the first so many texts the tokenizer may refuse any few."""
_MOST_BYTES = 2**28
"""Of a tokenizer's file: ten times the largest known."""
TOKENIZER_FILE, SENTENCEPIECE_FILE = "tokenizer.json", "tokenizer.model"
_END_OF_DOCUMENT = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "[EOS]")


class Tokenizer(Protocol):
    """The interface of tokenizers for streams and generation.

    Attributes:
        vocabulary: one more than the largest id.
        sha256: hash (hex) of the tokenizer file; "" if there is no file.
        separator: ids that follow each document; may be empty.
        separator_bytes: bytes of text that each of these ids encodes; 0 for a special token.
    """

    @property
    def vocabulary(self) -> int: ...

    @property
    def sha256(self) -> str: ...

    @property
    def separator(self) -> Tokens: ...

    @property
    def separator_bytes(self) -> Tokens: ...

    def encode(self, text: str) -> Tokens:
        """Ids of `text`, int32 [n], without special tokens. Lone surrogates count as '?'."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[Tokens]:
        """As :meth:`encode` for each text, in less time."""
        ...

    def encode_counted(self, text: str) -> tuple[Tokens, Tokens]:
        """Ids of `text`, and the number of its UTF-8 bytes that each id encodes; both int32 [n].

        If there are ids, the numbers add up to the bytes of `text`. A character that several ids share counts
        for the first of them. Text that the tokenizer drops counts for the next id.
        """
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`; bytes that are not (yet) UTF-8 become U+FFFD."""
        ...


class ByteTokenizer:
    """The UTF-8 bytes of the text are its ids. A newline separates documents."""

    vocabulary = 256
    sha256 = ""
    separator: Tokens = np.array([ord("\n")], dtype=np.int32)
    separator_bytes: Tokens = np.ones(1, dtype=np.int32)

    def encode(self, text: str) -> Tokens:
        return np.frombuffer(text.encode(errors="replace"), dtype=np.uint8).astype(np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[Tokens]:
        return [self.encode(text) for text in texts]

    def encode_counted(self, text: str) -> tuple[Tokens, Tokens]:
        ids = self.encode(text)
        return ids, np.ones_like(ids)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")


class FileTokenizer:
    """A ``tokenizer.json`` of the tokenizers library, or a SentencePiece model, which becomes one.

    The token `end` separates documents; without it the first one with a usual name, else the encoding of a
    newline. Truncation and padding are switched off. A text that the library refuses has no ids.

    Raises ValueError if `content` is no such file or lacks `end`; HetnodeError MISSING_EXTRA without the
    library.

    Attributes:
        content: the bytes of the file.
        definition: the ``tokenizer.json``.
        usual_ends: its tokens with usual names of an end-of-text token.
        end: the end-of-text token, or None.
    """

    def __init__(self, content: bytes, end: str = "") -> None:
        definition = content.decode("utf-8-sig") if _is_json(content) else definition_of(content)
        with needed(Extra.HF):
            from tokenizers import Tokenizer  # noqa: PLC0415
        try:
            self._inner = Tokenizer.from_str(definition)
        except Exception as error:  # the library raises bare Exception
            raise ValueError(str(error)) from None
        self._left_out = LeftOut("texts", _EARLY_TEXTS)
        self._inner.no_truncation()
        self._inner.no_padding()
        ids = self._inner.get_vocab(with_added_tokens=True)
        if not ids:
            raise ValueError("its vocabulary is empty")
        self.vocabulary: int = max(ids.values()) + 1
        self.content, self.definition = content, definition
        self.sha256 = hashlib.sha256(content).hexdigest()
        if end and end not in ids:
            raise ValueError(f"it has no token {end!r:.60}")
        self.usual_ends = [name for name in _END_OF_DOCUMENT if name in ids]
        self.end = end or next(iter(self.usual_ends), None)
        self.separator: Tokens
        self.separator_bytes: Tokens
        if self.end is None:
            self.separator, self.separator_bytes = self.encode_counted("\n")
        else:
            self.separator = np.array([ids[self.end]], dtype=np.int32)
            self.separator_bytes = np.zeros(1, dtype=np.int32)

    @property
    def file_name(self) -> str:
        """The usual name of such a file, under which :func:`find_tokenizer` finds it."""
        return TOKENIZER_FILE if _is_json(self.content) else SENTENCEPIECE_FILE

    def token(self, number: int) -> str | None:
        """The token with this id."""
        return self._inner.id_to_token(number) if 0 <= number < self.vocabulary else None

    def number(self, token: str) -> int | None:
        """The id of `token`."""
        found: int | None = self._inner.token_to_id(token)
        return found

    def encode(self, text: str) -> Tokens:
        encoding = self._encoding(text)
        return np.array(encoding.ids if encoding else [], dtype=np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[Tokens]:
        well_formed = [text.encode(errors="replace").decode() for text in texts]
        try:
            encodings = self._inner.encode_batch_fast(well_formed, add_special_tokens=False)
        except BaseException as error:
            _why(error)
            return [self.encode(text) for text in texts]
        self._left_out.good(len(texts))
        return [np.array(each.ids, dtype=np.int32) for each in encodings]

    def encode_counted(self, text: str) -> tuple[Tokens, Tokens]:
        encoding = self._encoding(text)
        ids = np.array(encoding.ids if encoding else [], dtype=np.int32)
        if not encoding or not len(ids):
            return ids, ids
        points = np.frombuffer(text.encode("utf-32-le", errors="replace"), dtype="<u4")
        widths = 1 + (points >= 0x80) + (points >= 0x800) + (points >= 0x10000)
        bytes_before = np.concatenate([[0], widths.cumsum()])
        # Post-processors may exclude blanks from the offsets; they count for the next id.
        ends = np.maximum.accumulate([end for _, end in encoding.offsets])
        ends[-1] = len(points)
        return ids, np.diff(bytes_before[ends], prepend=0).astype(np.int32)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._inner.decode(list(ids), skip_special_tokens=False))

    def _encoding(self, text: str) -> Encoding | None:
        """None of a text that the library refuses. Raises DATA_UNREADABLE where these are many."""
        well_formed = text.encode(errors="replace").decode()
        try:
            encoding = self._inner.encode(well_formed, add_special_tokens=False)
        except BaseException as error:
            cause = f"The tokenizer cannot encode a text: {_why(error)}."
            remedy = "Use a tokenizer with a token for what it does not know, or other data."
            self._left_out.bad(HetnodeError(ErrorCode.DATA_UNREADABLE, cause, remedy))
            return None
        self._left_out.good()
        return encoding


def _why(error: BaseException) -> str:
    """What the library says. Raises `error` if it is not of the library, whose panics are no Exception."""
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error
    return " ".join(str(error).split()).rstrip(".")


def _is_json(content: bytes) -> bool:
    return content.removeprefix(BOM_UTF8).lstrip().startswith(b"{")


def load_tokenizer(data: DataSpec, path: str | None = None) -> Tokenizer:
    """The tokenizer of a run.

    Args:
        data: the run's data section.
        path: the tokenizer file on this node, if its path differs from the spec.

    Raises:
        HetnodeError: TOKENIZER_UNREADABLE; MISSING_EXTRA.
    """
    where = path or data.tokenizer
    if where == BYTES:
        return ByteTokenizer()
    try:
        return FileTokenizer(_content(Path(os.path.expanduser(where))), data.end_token)
    except (OSError, ValueError) as error:
        raise HetnodeError(
            ErrorCode.TOKENIZER_UNREADABLE,
            f"The tokenizer {where} cannot be read: {error}.",
            "Give 'byte' or the path of a tokenizer.json that the tokenizers library can load, or of a "
            "SentencePiece model (BPE).",
        ) from None


def _content(path: Path) -> bytes:
    # A device or a pipe has no end.
    if path.exists() and not path.is_file():
        raise ValueError("it is not a file")
    with path.open("rb") as file:
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise ValueError(f"it has more than {_MOST_BYTES >> 20} MiB")
    return content


def find_tokenizer(data: DataSpec, *search_paths: Path | None, is_own_run: bool = True) -> str | None:
    """Find the run's tokenizer file on this machine by its hash; None if there is none.

    Candidates are files of the usual names in each of `search_paths` and the folders above it; in a run of
    the machine's owner also the path in the spec. None also if the spec has no hash of a tokenizer.
    """
    if not data.tokenizer_sha256:
        return None
    starts = [path.absolute() for path in search_paths if path is not None]
    folders = [folder for start in starts for folder in (start, *start.parents)]
    usual = (folder / name for folder in folders for name in (TOKENIZER_FILE, SENTENCEPIECE_FILE))
    named = [Path(os.path.expanduser(data.tokenizer))] if is_own_run else []
    for path in (*named, *usual):
        if has_hash(path, data.tokenizer_sha256):
            return str(path)
    return None


def has_hash(path: Path, sha256: str) -> bool:
    """Whether there is a file at `path` that can be read, and has this hash (hex)."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == sha256
    except OSError:
        return False


def check_tokenizer(spec: RunSpec, path: str | None = None) -> Tokenizer:
    """Load the tokenizer and check its hash, and that the model has a row for every id.

    Raises:
        HetnodeError: TOKENIZER_UNREADABLE, TOKENIZER_MISMATCH or MISSING_EXTRA.
    """
    tokenizer = load_tokenizer(spec.data, path)
    name = path or spec.data.tokenizer
    if tokenizer.vocabulary > spec.model.vocabulary:
        raise HetnodeError(
            ErrorCode.TOKENIZER_MISMATCH,
            f"The tokenizer '{name}' has {tokenizer.vocabulary} ids, "
            f"the model's vocabulary is {spec.model.vocabulary}.",
            f"Set model.vocabulary to at least {tokenizer.vocabulary} or choose a smaller tokenizer.",
        )
    if spec.data.tokenizer_sha256 and tokenizer.sha256 != spec.data.tokenizer_sha256:
        raise HetnodeError(
            ErrorCode.TOKENIZER_MISMATCH,
            f"The tokenizer '{name}' has sha-256 {tokenizer.sha256 or '(none)'}, "
            f"the run's has {spec.data.tokenizer_sha256}.",
            "Use the tokenizer file with which the run was started.",
        )
    if spec.data.pack == "documents" and [spec.data.separator] != tokenizer.separator.tolist():
        raise HetnodeError(
            ErrorCode.TOKENIZER_MISMATCH,
            f"Documents of the run end with token {spec.data.separator}, those of the tokenizer '{name}' "
            f"with {tokenizer.separator.tolist()}.",
            "Let the program write data.separator, as 'hetnode coordinator' does.",
        )
    return tokenizer


def pinned(spec: RunSpec, *search_paths: Path | None, tokenizer: str | None = None) -> RunSpec:
    """Pin the tokenizer file by its hash, so that every node must have the same one, and where documents end.

    `tokenizer` is where it lies now, if that is elsewhere than the spec says; else one that is known by its
    hash is looked for in `search_paths`, too (:func:`find_tokenizer`).
    """
    tokenizer = tokenizer or find_tokenizer(spec.data, *search_paths)
    data, are_apart = spec.data, spec.data.pack == "documents"
    if data.tokenizer != BYTES and (are_apart or not data.tokenizer_sha256):
        found = load_tokenizer(data, tokenizer)
        pins: dict[str, object] = {"tokenizer_sha256": data.tokenizer_sha256 or found.sha256}
        pins |= {"separator": _end_in(found, data.tokenizer)} if are_apart else {}
        spec = RunSpec.model_validate({**spec.model_dump(), "data": {**data.model_dump(), **pins}})
    used = check_tokenizer(spec, tokenizer)
    if isinstance(used, FileTokenizer) and not spec.data.end_token and len(usual := used.usual_ends) != 1:
        what = f"{usual[0]} (it also has {', '.join(usual[1:])})" if usual else "a newline"
        log.warning("%s: each document is followed by %s; or set data.end_token", spec.data.tokenizer, what)
    return spec


def _end_in(tokenizer: Tokenizer, name: str) -> int:
    """The id of the token that ends documents. Raises HetnodeError BAD_SPEC where that is other text."""
    if isinstance(tokenizer, FileTokenizer) and tokenizer.end is not None:
        return int(tokenizer.separator[0])
    raise HetnodeError(
        ErrorCode.BAD_SPEC,
        f'data.pack = "documents" needs a token that ends a document, and {name} has none with a usual name.',
        "Name one of its tokens with data.end_token; or leave out data.pack.",
    )
