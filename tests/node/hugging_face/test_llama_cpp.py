"""What llama.cpp's converter reads of an export, and what its tokenizer makes of it.

The converter takes a byte-level BPE only if it knows the hash of its ids, and llama.cpp loads none without
merges. A SentencePiece model is converted piece by piece.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from node.checkpoint import global_model
from node.data.declared import CONFIG_FILE
from node.data.sentencepiece_model import definition_of
from node.data.tokenizer import ByteTokenizer, FileTokenizer
from node.hugging_face.export import export
from node.hugging_face.pieces import pieces_of
from node.hugging_face.tokenizer import tokenizer_files
from node.hugging_face.weights import DTYPES
from protocol.run_files.resolve import resolve
from protocol.spec.sections import ModelSpec
from tests.support.hugging_face import output_of
from tests.support.models import random_model
from tests.support.sentencepiece_models import trained

VOCABULARY = 300


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("run")
    spec = resolve("nano", overrides={"model.layers": 2, "model.vocabulary": VOCABULARY})
    global_model.write(place / "run", spec, 1, random_model(spec))
    export(global_model.verify(place / "run"), place / "hf", DTYPES["fp32"], 10**9)
    return place / "hf"


def _pieces(folder: Path) -> dict[str, int]:
    """The ids of texts as the converter writes them. Those of bytes have names such as <0x0A>."""
    read = sentencepiece.SentencePieceProcessor(str(folder / "tokenizer.model"))
    assert all(read.IsByte(number) for number in range(256))
    assert [number for number in range(len(read)) if read.IsUnknown(number)] == [256]
    names = [read.IdToPiece(number) for number in range(len(read))]
    for text, number in json.loads((folder / "added_tokens.json").read_text()).items():
        names[number] = text
    return {name: number for number, name in enumerate(names)}


@settings(deadline=None)
@given(text=st.text() | st.text(alphabet=" \u2581<0x41>é😀\n"))
def test_any_text_has_the_ids_of_its_bytes(exported: Path, text: str) -> None:
    """Tokens that users add are cut out of a text first; a character that is no piece becomes its bytes."""
    pieces = _pieces(exported)
    well_formed = text.encode(errors="replace").decode()
    found = [
        number
        for letter in well_formed
        for number in (
            [pieces[letter]]
            if letter in pieces
            else [pieces[f"<0x{byte:02X}>"] for byte in letter.replace(" ", "\u2581").encode()]
        )
    ]
    assert found == ByteTokenizer().encode(text).tolist()


@pytest.mark.parametrize("has_prefix", [True, False])
def test_a_vocabulary_with_byte_fallback_has_its_merges_in_the_order_of_training(has_prefix: bool) -> None:
    """As Llama 2 and Mistral publish it: the converter alone would give each merge the same score."""
    model = trained(add_dummy_prefix=has_prefix)
    definition = json.loads(definition_of(model))
    names = ("<unk>", "<s>", "</s>")
    definition["added_tokens"] = [
        {"id": ids, "content": name, "special": True} for ids, name in enumerate(names)
    ]
    made = pieces_of(definition)
    assert made is not None
    own, theirs = (sentencepiece.SentencePieceProcessor(model_proto=each) for each in (made, model))
    for number in range(len(theirs)):
        for kind in (theirs.IsByte, theirs.IsControl, theirs.IsUnknown):
            assert kind(number) == getattr(own, kind.__name__)(number)
        assert own.IdToPiece(number) == theirs.IdToPiece(number)
    for text in ("", " a", "  def f(x):\n\treturn  self ", "naïve 漢字 🙂", Path(json.__file__).read_text()):
        assert own.Encode(text) == theirs.Encode(text)
    assert (
        json.loads(tokenizer_files(FileTokenizer(model), {}, ModelSpec())[CONFIG_FILE]).get(
            "add_prefix_space", True
        )
        == has_prefix
    )


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"byte_fallback": False}},
        {"model": {"unk_token": None}},
        {"model": {"type": "Unigram"}},
        {"model": {"merges": [["a", "b"]]}},
        {"normalizer": {"type": "NFC"}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": {"type": "Metaspace", "split": True}, "normalizer": None},
        {"added_tokens": [{"id": 5000, "content": "far", "special": False}]},
    ],
)
def test_a_vocabulary_that_sentencepiece_would_read_otherwise_gets_no_model(change: dict[str, Any]) -> None:
    definition = json.loads(definition_of(trained()))
    assert pieces_of(definition) is not None
    model = definition["model"] | change.get("model", {})
    assert pieces_of(definition | change | {"model": model}) is None


def test_nothing_is_added_around_a_text(exported: Path) -> None:
    config = json.loads((exported / "tokenizer_config.json").read_text())
    assert [config[name] for name in ("add_bos_token", "add_eos_token", "add_prefix_space")] == [False] * 3
    assert VOCABULARY > 256, "the piece for unknown text has a row"


@pytest.mark.parametrize("variant", [{"model.qk_norm": True}, {"model.norms": "outputs"}], ids=str)
def test_a_model_whose_pieces_the_converter_reads_otherwise_or_not_has_none(
    tmp_path: Path, variant: dict[str, Any]
) -> None:
    """A text for Qwen3 would begin with a space; for OLMo2 the converter takes byte-level BPE alone."""
    spec = resolve("nano", overrides={"model.layers": 2, **variant})
    global_model.write(tmp_path / "run", spec, 1, random_model(spec))
    said = output_of("export", tmp_path / "run", tmp_path / "hf")
    assert "llama.cpp's converter takes this vocabulary if it is one of those that it lists." in said
    assert not (tmp_path / "hf" / "tokenizer.model").exists()
