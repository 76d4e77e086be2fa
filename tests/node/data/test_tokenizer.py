"""Byte and file tokenizers behind one interface; a wrong tokenizer is refused before it trains anything."""

from __future__ import annotations

import hashlib
import json
from codecs import BOM_UTF8
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from node.data.stream import open_stream
from node.data.tokenizer import Tokenizer, check_tokenizer, load_tokenizer, pinned
from protocol.errors import ErrorCode, HetnodeError
from protocol.run_files.resolve import resolve
from protocol.spec.data import DataSpec

TEXTS = ["", "plain words and more words\n", "naïve café – 漢字 🙂", "tabs\tand\r\nbreaks\n\n"]


def train_bpe(path: Path, vocabulary: int = 270, special: tuple[str, ...] = ("<|endoftext|>",)) -> Path:
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(["plain words and more words " * 20], trainer)
    inner.enable_truncation(4)
    inner.enable_padding()
    inner.save(str(path))
    return path


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_bpe(tmp_path_factory.mktemp("bpe") / "tokenizer.json")


@pytest.fixture(params=["byte", "file"])
def tokenizer(request: pytest.FixtureRequest, bpe: Path) -> Tokenizer:
    return load_tokenizer(DataSpec(tokenizer="byte" if request.param == "byte" else str(bpe)))


@pytest.mark.parametrize("text", TEXTS)
def test_decoding_what_was_encoded_gives_the_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert ids.ndim == 1
    assert tokenizer.decode(ids.tolist()) == text
    assert all(0 <= token < tokenizer.vocabulary for token in ids.tolist())


def test_texts_that_are_encoded_together_have_the_ids_of_each(tokenizer: Tokenizer) -> None:
    texts = [*TEXTS, "a\ud800b", *TEXTS]
    for together, text in zip(tokenizer.encode_batch(texts), texts, strict=True):
        assert together.dtype == np.int32
        assert together.tolist() == tokenizer.encode(text).tolist()
    assert tokenizer.encode_batch([]) == []


def test_lone_surrogates_do_not_break_encoding(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("a\ud800b").tolist()) == "a?b"


def test_half_a_character_decodes_to_the_replacement_sign(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("é").tolist()
    assert len(ids) == 2
    assert tokenizer.decode(ids[:1]) == "\ufffd"


@given(text=st.text())
def test_bytes_round_trip_any_text(text: str) -> None:
    tokenizer = load_tokenizer(DataSpec())
    assert tokenizer.decode(tokenizer.encode(text).tolist()) == text


def test_the_separator_of_bytes_is_a_newline() -> None:
    assert load_tokenizer(DataSpec()).separator.tolist() == [10]


def test_the_separator_of_a_file_is_its_end_of_text_token_or_else_a_newline(tmp_path: Path) -> None:
    for special, expected in (("</s>", "</s>"), ("<pad>", "\n")):
        path = train_bpe(tmp_path / "tokenizer.json", special=(special,))
        tokenizer = load_tokenizer(DataSpec(tokenizer=str(path)))
        assert tokenizer.decode(tokenizer.separator.tolist()) == expected


def test_the_file_is_known_by_its_hash(bpe: Path) -> None:
    expected = hashlib.sha256(bpe.read_bytes()).hexdigest()
    assert load_tokenizer(DataSpec(tokenizer=str(bpe))).sha256 == expected
    spec = resolve(
        "nano",
        overrides={"model.vocabulary": 300, "data.tokenizer": str(bpe), "data.tokenizer_sha256": expected},
    )
    assert check_tokenizer(spec).sha256 == expected


def test_a_byte_order_mark_before_the_file_is_no_part_of_it(bpe: Path, tmp_path: Path) -> None:
    marked = tmp_path / "tokenizer.json"
    marked.write_bytes(BOM_UTF8 + bpe.read_bytes())
    text = "def encode(text):"
    found = load_tokenizer(DataSpec(tokenizer=str(marked)))
    assert found.encode(text).tolist() == load_tokenizer(DataSpec(tokenizer=str(bpe))).encode(text).tolist()


def test_a_node_may_keep_the_file_elsewhere(bpe: Path) -> None:
    spec = resolve("nano", overrides={"model.vocabulary": 300, "data.tokenizer": "not/here.json"})
    assert check_tokenizer(spec, str(bpe)).vocabulary == 270


@pytest.mark.parametrize("content", [None, b"", b"{", b"\xff\xfe", json.dumps({"model": {}}).encode()])
def test_an_unreadable_file_is_reported_with_its_path(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(HetnodeError) as caught:
        load_tokenizer(DataSpec(tokenizer=str(path)))
    assert caught.value.code is ErrorCode.TOKENIZER_UNREADABLE
    assert str(path) in caught.value.cause


def test_ids_beyond_the_model_are_refused(bpe: Path) -> None:
    with pytest.raises(HetnodeError) as caught:
        check_tokenizer(resolve("nano", overrides={"data.tokenizer": str(bpe)}))
    assert caught.value.code is ErrorCode.TOKENIZER_MISMATCH
    assert "270" in caught.value.cause
    assert "256" in caught.value.cause


@pytest.mark.parametrize("kind", ["byte", "file"])
def test_another_tokenizer_than_the_runs_is_refused(bpe: Path, kind: str) -> None:
    spec = resolve(
        "nano",
        overrides={
            "model.vocabulary": 300,
            "data.tokenizer": "byte" if kind == "byte" else str(bpe),
            "data.tokenizer_sha256": "0" * 64,
        },
    )
    with pytest.raises(HetnodeError) as caught:
        check_tokenizer(spec)
    assert caught.value.code is ErrorCode.TOKENIZER_MISMATCH
    assert "0" * 64 in caught.value.cause


APART = {"model.vocabulary": 300, "data.pack": "documents"}


def test_a_run_whose_documents_are_apart_says_with_which_token_they_end(bpe: Path, tmp_path: Path) -> None:
    spec = resolve("nano", overrides={**APART, "data.tokenizer": str(bpe)})
    with pytest.raises(HetnodeError, match="end with token None") as caught:
        check_tokenizer(spec)
    assert caught.value.code is ErrorCode.TOKENIZER_MISMATCH
    found = pinned(spec)
    assert [found.data.separator] == load_tokenizer(found.data).separator.tolist()
    assert pinned(found) == found
    check_tokenizer(found)
    plain = train_bpe(tmp_path / "tokenizer.json", special=())
    with pytest.raises(HetnodeError, match="has none with a usual name") as caught:
        pinned(resolve("nano", overrides={**APART, "data.tokenizer": str(plain)}))
    assert caught.value.code is ErrorCode.BAD_SPEC


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        ({"data.pack": "documents"}, "the byte tokenizer has no end_token"),
        ({"data.tokenizer": "a.json", "data.separator": 3}, "a separator is for pack 'documents'"),
    ],
)
def test_documents_that_cannot_be_apart_are_refused(overrides: dict[str, object], why: str) -> None:
    with pytest.raises(HetnodeError, match=why):
        resolve("nano", overrides=overrides)


def save(inner: tokenizers.Tokenizer, folder: Path) -> Tokenizer:
    inner.save(str(folder / "tokenizer.json"))
    return load_tokenizer(DataSpec(tokenizer=str(folder / "tokenizer.json")))


def words_alone(folder: Path) -> Tokenizer:
    """It has no token for a word that it does not know: the library raises."""
    inner = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "</s>": 2}))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return save(inner, folder)


def test_a_text_that_the_tokenizer_refuses_has_no_ids(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = words_alone(tmp_path)
    texts = ["a b"] * 30 + ["a c"] + ["b"] * 30
    for encoded in (tokenizer.encode_batch(texts), [tokenizer.encode(text) for text in texts]):
        assert [ids.tolist() for ids in encoded] == [[0, 1]] * 30 + [[]] + [[1]] * 30
    assert [len(part) for part in tokenizer.encode_counted("c")] == [0, 0]
    assert "1 of 31 texts left out" in caplog.text


def test_a_tokenizer_that_refuses_many_texts_ends_the_reading(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("c d\n" * 50_000)
    words_alone(tmp_path)
    data = {"data.tokenizer": str(tmp_path / "tokenizer.json"), "data.source": f"text:{tmp_path}/corpus.txt"}
    with pytest.raises(HetnodeError, match="6 of 6 texts are bad") as caught:
        open_stream(resolve("nano", overrides=data))
    assert caught.value.code is ErrorCode.DATA_UNREADABLE


def test_a_tokenizer_that_refuses_a_newline_has_no_separator(tmp_path: Path) -> None:
    tokenizer = save(tokenizers.Tokenizer(models.Unigram([("a", -1.0), ("b", -2.0)])), tmp_path)
    assert tokenizer.separator.tolist() == tokenizer.separator_bytes.tolist() == []
    assert tokenizer.encode("ab").tolist() == [0, 1]
