"""A SentencePiece model in a run: the library's ids, one hash, and an export with equal ids."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece

from node.data.tokenizer import FileTokenizer, check_tokenizer, find_tokenizer, load_tokenizer
from node.hugging_face.tokenizer import tokenizer_files
from protocol.errors import ErrorCode, HetnodeError
from protocol.run_files.resolve import resolve
from protocol.spec.data import DataSpec
from protocol.spec.run import RunSpec
from protocol.spec.sections import ModelSpec
from tests.support.sentencepiece_models import TEXT, trained

_PARTS = (
    *("def", " ", "  ", "self", "\n", "\r\n", "\t", "é", "漢", "🙂", "\xa0", "\x00"),
    *("</s>", "<s>", "<0x41>", "a", "th", "the", "re", "0", "12", ".", "(", "return"),
)
_TEXTS = [
    "",
    " ",
    "  two  spaces\n\n x",
    " first",
    "naïve 漢字 🙂 end",
    "</s> <s> as text",
    "tab\tand\r\n",
    TEXT,
]


def _texts(count: int) -> list[str]:
    coin = random.Random(1)
    return _TEXTS + ["".join(coin.choices(_PARTS, k=coin.randrange(24))) for _ in range(count)]


@pytest.fixture(scope="module")
def model() -> bytes:
    return trained()


@pytest.fixture
def file(model: bytes, tmp_path: Path) -> Path:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(model)
    return path


def _spec(file: Path | str, **data: Any) -> RunSpec:
    overrides = {"model.vocabulary": 640, "data.tokenizer": str(file)}
    return resolve("nano", overrides=overrides | {f"data.{name}": value for name, value in data.items()})


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_dummy_prefix": False},
        {"byte_fallback": False},
        {"normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True},
    ],
    ids=lambda options: ", ".join(options) or "as Llama 2",
)
def test_ids_are_those_of_the_sentencepiece_library(options: dict[str, Any]) -> None:
    content = trained(**options)
    library = sentencepiece.SentencePieceProcessor(model_proto=content)
    tokenizer = FileTokenizer(content)
    assert tokenizer.vocabulary == library.vocab_size()
    for text in _texts(400):
        assert tokenizer.encode(text).tolist() == library.encode(text), repr(text)


def test_text_comes_back_whole_through_bytes_where_no_piece_fits(model: bytes) -> None:
    tokenizer = FileTokenizer(model)
    for text in _texts(200):
        ids, nbytes = tokenizer.encode_counted(text)
        assert tokenizer.decode(ids.tolist()) == text
        assert nbytes.sum() == len(text.encode())
        np.testing.assert_array_equal(ids, tokenizer.encode(text))
    ids, nbytes = tokenizer.encode_counted("漢")
    assert (len(ids), nbytes.tolist()) == (4, [3, 0, 0, 0]), "a mark for the space before, and three bytes"


def test_the_end_of_text_separates_documents_and_no_text_gives_it(model: bytes) -> None:
    tokenizer = FileTokenizer(model)
    assert tokenizer.end == "</s>"
    assert tokenizer.separator.tolist() == [2]
    assert 2 not in tokenizer.encode("a </s> b")


def test_a_run_knows_its_model_file_by_its_hash(file: Path, model: bytes, tmp_path: Path) -> None:
    sha256 = hashlib.sha256(model).hexdigest()
    spec = _spec("elsewhere/tokenizer.model", tokenizer_sha256=sha256)
    assert find_tokenizer(spec.data, tmp_path / "below" / "run") == str(file)
    assert check_tokenizer(spec, str(file)).sha256 == sha256
    with pytest.raises(HetnodeError) as caught:
        check_tokenizer(_spec(file, tokenizer_sha256="0" * 64))
    assert caught.value.code is ErrorCode.TOKENIZER_MISMATCH


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "neither"),
        (b"\n\x0e\n\x05<unk>\x15", "neither"),
        (b"\x00\x01\x02", "neither"),
        ({"model_type": "unigram"}, "another kind than BPE"),
        ({"treat_whitespace_as_suffix": True}, "spaces before words"),
        ({"user_defined_symbols": ["<tool>"]}, "user-defined symbols"),
    ],
    ids=["empty", "cut", "garbage", "unigram", "suffix", "user-defined"],
)
def test_another_file_or_kind_of_model_is_refused(
    content: bytes | dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(content if isinstance(content, bytes) else trained(**content))
    with pytest.raises(HetnodeError) as caught:
        load_tokenizer(DataSpec(tokenizer=str(path)))
    assert caught.value.code is ErrorCode.TOKENIZER_UNREADABLE
    assert words in caught.value.cause


def test_transformers_gives_equal_ids_from_an_export(model: bytes, tmp_path: Path) -> None:
    from transformers import AutoTokenizer  # noqa: PLC0415  collecting the tests needs none of it

    tokenizer = FileTokenizer(model)
    for name, content in tokenizer_files(tokenizer, {"eos_token": "</s>"}, ModelSpec()).items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert (tmp_path / "tokenizer.model").read_bytes() == model
    published = AutoTokenizer.from_pretrained(str(tmp_path))
    for text in _texts(100):
        if "</s>" not in text:  # transformers reads its name as the symbol
            ids = published(text)["input_ids"]
            assert ids == tokenizer.encode(text).tolist(), repr(text)
            assert published.decode(ids) == text
    assert published.eos_token_id == 2
