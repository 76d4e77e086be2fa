"""What a published model declares beside its weights comes back with an export: tokens, template, origin."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers

from node.checkpoint import global_model
from node.data.declared import as_file, declared_beside
from node.data.tokenizer import FileTokenizer
from node.hugging_face.card import CardFacts, card
from node.hugging_face.export import NOTHING_MEASURED, export
from node.hugging_face.weights import DTYPES
from node.views.swarm import SwarmView
from protocol.run_files.resolve import resolve
from tests.support.hugging_face import output_of
from tests.support.models import PLAIN, random_model, write_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEMPLATE = "{{ bos_token }}{% for each in messages %}{{ each['content'] }}{% endfor %}"
SPECIAL = ("<|begin|>", "<|endoftext|>", "<|pad|>")


def _tokenizer() -> RawTokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = RawTokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    raw.add_special_tokens(list(SPECIAL))
    return raw


def _published(folder: Path, **changes: Any) -> Path:
    """The folder of a model of 259 ids, as transformers saves one, with `changes` of its config.json."""
    spec = resolve("nano", overrides={"model.vocabulary": 259, "model.layers": 2})
    global_model.write(folder / "run", spec, 1, random_model(spec))
    export(global_model.verify(folder / "run"), folder / "hf", DTYPES["fp32"], 10**9)
    for name in ("tokenizer.model", "added_tokens.json", "tokenizer_config.json"):
        (folder / "hf" / name).unlink()
    _tokenizer().save(str(folder / "hf" / "tokenizer.json"))
    config = json.loads((folder / "hf" / "config.json").read_text())
    (folder / "hf" / "config.json").write_text(json.dumps(config | changes))
    return folder / "hf"


def _load(folder: Path, monkeypatch: pytest.MonkeyPatch) -> PreTrainedTokenizerBase:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from transformers import AutoTokenizer  # noqa: PLC0415  collecting the tests needs no transformers

    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def _through_a_run(hf: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The export of what is imported, from the folder of a swarm that trained it."""
    (place / "few.txt").write_text("the café of the open thing\n" * 200)
    data = f"text:{place / 'few.txt'}"
    output_of("import", hf, "--out", place / "mine", "--preset", "nano", "--set", f"data.source={data}")
    monkeypatch.setattr(SwarmView, "run", lambda *_: None)
    output_of("swarm", "up", "--config", place / "mine" / "run.toml", "--folder", place / "swarm")
    spec = resolve(file=place / "mine" / "run.toml")
    global_model.write(place / "swarm" / "checkpoint", spec, 1, random_model(spec))
    output_of("export", place / "swarm", place / "out")
    return place / "out"


@pytest.mark.parametrize("form", ["strings", "records", "ids", "jinja"])
def test_begin_padding_and_chat_template_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    begin, _, pad = SPECIAL
    ids = {"bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258} if form == "ids" else {}
    hf = _published(tmp_path, **ids)
    config: dict[str, Any] = {"bos_token": begin, "pad_token": pad, "chat_template": TEMPLATE}
    if form == "records":
        config |= {name: {"content": config[name], "lstrip": False} for name in ("bos_token", "pad_token")}
    if form == "ids":
        config = {"bos_token": None, "chat_template": TEMPLATE}
    if form == "jinja":
        (hf / "chat_template.jinja").write_text(config.pop("chat_template"))
    (hf / "tokenizer_config.json").write_text(json.dumps(config))
    out = _through_a_run(hf, tmp_path, monkeypatch)
    found = _load(out, monkeypatch)
    assert (found.bos_token_id, found.eos_token_id, found.pad_token_id) == (256, 257, 258)
    for file in ("config.json", "generation_config.json"):
        read = json.loads((out / file).read_text())
        assert [read[f"{name}_token_id"] for name in ("bos", "eos", "pad")] == [256, 257, 258]
    said = found.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert said == f"{begin}hello"
    text = "the café <|pad|> of"
    assert found(text).input_ids == FileTokenizer((out / "tokenizer.json").read_bytes()).encode(text).tolist()


def test_named_templates_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hf = _published(tmp_path)
    named = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": "x"}]
    (hf / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    out = _through_a_run(hf, tmp_path, monkeypatch)
    assert json.loads((out / "tokenizer_config.json").read_text())["chat_template"] == named


@pytest.mark.parametrize(
    "content",
    [
        b"[]", b"{", b"\xff", b"[" * 100_000,
        as_file({"bos_token": "<none>", "pad_token": 7, "chat_template": "x" * 2**19, "base_model": 5}),
        as_file({"chat_template": ["x"], "bos_token": {"content": ["x"]}}),
        as_file({"chat_template": [{"name": "default"}], "base_model": "x" * 1000}),
    ],
)  # fmt: skip
def test_what_has_another_form_is_left_out(tmp_path: Path, content: bytes) -> None:
    _tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_bytes(content)
    tokenizer = FileTokenizer((tmp_path / "tokenizer.json").read_bytes())
    assert declared_beside(tmp_path / "tokenizer.json", tokenizer) == {}


def test_a_card_names_the_model_from_which_a_run_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name is that of the hub's cache, or the one that transformers wrote; a local folder gives none."""
    for number, (place, saved_as, base) in enumerate(
        (
            ("models--Qwen--Qwen2.5-0.5B/snapshots/4a1b", None, "Qwen/Qwen2.5-0.5B"),
            ("plain", "meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-1B"),
            ("secret-place", "/home/jo/secret-place", None),
            ("secret-place", None, None),
        )
    ):
        folder = tmp_path / str(number) / place
        folder.mkdir(parents=True)
        hf = _published(folder, **({"_name_or_path": saved_as} if saved_as else {}))
        text = (_through_a_run(hf, folder, monkeypatch) / "README.md").read_text()
        assert (f"\nbase_model: {base}\n" in text) == (base is not None)
        assert "base_model" in text or base is None
        assert "secret-place" not in text


@pytest.mark.parametrize(
    ("changes", "name", "tag"),
    [
        ({}, "Llama architecture", "llama"),
        ({"model.qkv_bias": True}, "Qwen2 architecture, stored as a Llama with biases", "qwen2"),
        ({"model.qk_norm": True}, "Qwen3 architecture", "qwen3"),
        ({"model.rope_scaling": "smollm3"}, "SmolLM3 architecture", "smollm3"),
        ({"model.norms": "outputs"}, "OLMo2 architecture", "olmo2"),
    ],
)
def test_a_card_names_the_architecture(changes: dict[str, Any], name: str, tag: str) -> None:
    spec = resolve("nano", overrides=changes)
    text = card(CardFacts(spec, spec.data, 1, "float32", NOTHING_MEASURED))
    assert f"({name})" in text
    assert f"- {tag}\n" in text


def test_an_import_says_its_learning_rate_and_a_shorter_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    export(global_model.verify(write_model(tmp_path / "run", PLAIN)), tmp_path / "hf", DTYPES["fp32"], 10**9)
    config = json.loads(Path("hf/config.json").read_text())
    Path("hf/config.json").write_text(json.dumps({**config, "max_position_embeddings": 131_072}))
    said = output_of("import", "hf", "--out", "new", "--preset", "nano")
    spec = resolve(file=Path("new/run.toml"))
    assert (spec.inner.learning_rate, spec.model.context) == (1e-4, 2048)
    assert "Learning rate 0.0001." in said
    assert "does not tell the model's name on the hub" in said
    assert "Samples have 2048 tokens; the model is made for 131072." in said
    given = ("--set", "inner.learning_rate=0.01", "--set", "model.context=32")
    said = output_of("import", "hf", "--out", "set", "--preset", "nano", *given)
    assert resolve(file=Path("set/run.toml")).inner.learning_rate == 0.01
    assert "Learning rate 0.01. 0.0001 suits a model that has learned already." in said
    Path("own.toml").write_text('preset = "nano"\n[inner]\nlearning_rate = 0.002\n')
    assert "Learning rate 0.002." in output_of("import", "hf", "--out", "file", "--config", "own.toml")
    config["max_position_embeddings"] = PLAIN.model.context
    Path("hf/config.json").write_text(json.dumps(config))
    assert "Samples" not in output_of("import", "hf", "--out", "whole", "--preset", "nano")
