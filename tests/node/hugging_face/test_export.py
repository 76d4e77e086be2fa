"""transformers itself loads what is exported, computes the same, and speaks the same tokens."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor

import hetnode
from node.checkpoint import global_model
from node.data.tokenizer import ByteTokenizer, FileTokenizer
from node.generate import generate, whole_model
from node.hugging_face.card import Measured
from node.hugging_face.export import export
from node.hugging_face.tokenizer import byte_definition
from node.hugging_face.weights import DTYPES
from protocol.run_files.resolve import resolve
from protocol.spec.run import RunSpec
from tests.support.models import PLAIN, random_model, write_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

GB = 10**9


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("run"), PLAIN)


@pytest.fixture(scope="module")
def exported(run: Path) -> Path:
    export(global_model.verify(run), run.parent / "hf", DTYPES["fp32"], GB)
    return run.parent / "hf"


def _load(folder: Path, **options: object) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM  # noqa: PLC0415  collecting the tests needs no transformers

    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False, **options).eval()


def _load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer  # noqa: PLC0415  as above

    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def _logits(run: Path, ids: Tensor) -> Tensor:
    with torch.inference_mode():
        return whole_model(global_model.read(run))(ids)


def _their_logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    with torch.inference_mode():
        return model(ids).logits.float()


@pytest.fixture(scope="module")
def ids() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    shape = (3, PLAIN.model.context)
    return torch.randint(0, PLAIN.model.vocabulary, shape, generator=generator)


def test_logits_in_float32_differ_by_rounding_alone(run: Path, exported: Path, ids: Tensor) -> None:
    model = _load(exported)
    ours, theirs = _logits(run, ids), _their_logits(model, ids)
    assert model.dtype == torch.float32
    assert ours.std() > 1, "logits of a size that a trained model has"
    assert (ours - theirs).abs().max() < 1e-4
    for place in (run, exported):  # the module for programs is the same model
        with torch.inference_mode():
            assert torch.equal(hetnode.load_model(place)(ids), ours)
    assert hetnode.load_model(exported).encode("def ").tolist() == [[*b"def "]]


def test_shards_hold_the_same_model(run: Path, exported: Path, ids: Tensor, tmp_path: Path) -> None:
    export(global_model.verify(run), tmp_path / "hf", DTYPES["fp32"], 100_000)
    files = sorted(path.name for path in tmp_path.glob("hf/model*"))
    assert len(files) > 3
    assert files[-1] == "model.safetensors.index.json"
    assert all(path.stat().st_size < 110_000 for path in tmp_path.glob("hf/model-*"))
    assert torch.equal(_their_logits(_load(tmp_path / "hf"), ids), _their_logits(_load(exported), ids))


@pytest.mark.parametrize(("name", "epsilon"), [("bf16", 2.0**-8), ("fp16", 2.0**-11)])
def test_logits_of_narrow_weights_differ_as_their_rounding_lets_expect(
    run: Path, ids: Tensor, tmp_path: Path, name: str, epsilon: float
) -> None:
    """Rounding to nearest is a relative error of at most `epsilon`, and errors are independent of each other.

    So along the residual stream they add up in squares: of a layer's 9 tensors, and, where transformers also
    computes in that type, of the 15 activations that a layer makes of them one after the other. To this come
    the embedding, the last norm and the head. The largest of some 50,000 errors lies within 6 deviations.
    """
    export(global_model.verify(run), tmp_path / "hf", DTYPES[name], GB)
    ours = _logits(run, ids)
    for dtype, of_layer in ((torch.float32, 9), (DTYPES[name].torch, 9 + 15)):
        difference = _their_logits(_load(tmp_path / "hf", dtype=dtype), ids) - ours
        deviation = epsilon * math.sqrt(of_layer * PLAIN.model.layers + 3) * float(ours.std())
        assert difference.square().mean().sqrt() < deviation
        assert difference.abs().max() < 6 * deviation
    assert _load(tmp_path / "hf", dtype="auto").dtype == DTYPES[name].torch, "as the folder says"


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_nothing_but_the_rounding_of_weights_differs(
    run: Path, ids: Tensor, tmp_path: Path, name: str
) -> None:
    export(global_model.verify(run), tmp_path / "hf", DTYPES[name], GB)
    whole = global_model.read(run)
    rounded = {
        stage: {key: tensor.to(DTYPES[name].torch).float() for key, tensor in parameters.items()}
        for stage, parameters in whole.stages.items()
    }
    with torch.inference_mode():
        ours = whole_model(global_model.Checkpoint(whole.spec, whole.round_number, rounded))(ids)
    theirs = _their_logits(_load(tmp_path / "hf", dtype=torch.float32), ids)
    assert (ours - theirs).abs().max() < 1e-4


def test_transformers_generates_the_text_that_we_generate(run: Path, exported: Path) -> None:
    prompt, new = "def f(x):", 40
    ours = "".join(generate(global_model.read(run), prompt, new, temperature=0))
    tokenizer = _load_tokenizer(exported)
    prompt_ids = tokenizer(prompt, return_tensors="pt").input_ids
    theirs = _load(exported).generate(prompt_ids, max_new_tokens=new, do_sample=False)
    assert prompt_ids.shape[1] + new <= PLAIN.model.context
    assert tokenizer.decode(theirs[0, prompt_ids.shape[1] :]) == ours


def test_ids_that_the_tokenizer_lacks_are_never_generated(tmp_path: Path) -> None:
    spec = resolve("nano", overrides={"model.vocabulary": 300, "model.layers": 2})
    stages = random_model(spec)
    stages[1]["head"][256:] *= 100
    global_model.write(tmp_path / "run", spec, 1, stages)
    export(global_model.verify(tmp_path / "run"), tmp_path / "hf", DTYPES["fp32"], GB)
    found = _load(tmp_path / "hf").generate(torch.tensor([[65, 66]]), max_new_tokens=20, do_sample=False)
    ours = "".join(generate(global_model.read(tmp_path / "run"), "AB", 20, temperature=0))
    assert found.max() < 256
    assert ByteTokenizer().decode(found[0, 2:].tolist()) == ours


@pytest.fixture(scope="module")
def bytes_of_theirs(exported: Path) -> PreTrainedTokenizerBase:
    return _load_tokenizer(exported)


@settings(deadline=None, max_examples=100)
@given(text=st.text() | st.text(alphabet="Ġ <|endoftext|>\n\r\t é😀Ċ\u200b"))
def test_any_text_has_the_ids_of_its_bytes(bytes_of_theirs: PreTrainedTokenizerBase, text: str) -> None:
    well_formed = text.encode(errors="replace").decode()
    ours = ByteTokenizer().encode(text).tolist()
    found = bytes_of_theirs(well_formed).input_ids
    assert found == ours
    assert bytes_of_theirs.decode(ours) == well_formed


@settings(deadline=None, max_examples=100)
@given(content=st.binary(max_size=40))
def test_any_ids_decode_as_ours_do(bytes_of_theirs: PreTrainedTokenizerBase, content: bytes) -> None:
    assert bytes_of_theirs.decode(list(content)) == ByteTokenizer().decode(list(content))


def _trained_tokenizer(special: bool) -> RawTokenizer:
    raw = RawTokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(["the café of the open thing " * 5], trainer)
    if special:
        raw.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
        )
        raw.enable_truncation(8)
        raw.enable_padding(length=16)
    return raw


@pytest.mark.parametrize("special", [False, True])
def test_a_tokenizer_file_gives_the_ids_of_training(tmp_path: Path, special: bool) -> None:
    path = tmp_path / "own" / "tokenizer.json"
    path.parent.mkdir()
    _trained_tokenizer(special).save(str(path))
    own = FileTokenizer(path.read_bytes())
    spec = resolve(
        "nano",
        overrides={
            "model.vocabulary": 300,
            "data.tokenizer": str(path),
            "data.tokenizer_sha256": own.sha256,
        },
    )
    write_model(tmp_path / "run", spec)
    export(global_model.verify(tmp_path / "run" / "checkpoint"), tmp_path / "hf", DTYPES["fp32"], GB)
    theirs = _load_tokenizer(tmp_path / "hf")
    text = "  the thing of a café <|endoftext|> is\nopen, and so on and on"
    assert theirs(text).input_ids == own.encode(text).tolist()
    assert theirs.decode(own.encode(text).tolist()) == text
    assert theirs.eos_token_id == own.separator[0] == _load(tmp_path / "hf").generation_config.eos_token_id
    if not special:
        assert (tmp_path / "hf" / "tokenizer.json").read_bytes() == path.read_bytes()
    _assert_no_trace(tmp_path / "hf", tmp_path)


@pytest.mark.parametrize(
    "variant",
    [{"qkv_bias": True}, {"qk_norm": True}, {"rope_scaling": "smollm3"}, {"norms": "outputs"}],
    ids=str,
)
@pytest.mark.parametrize("file", [False, True])
def test_ids_do_not_depend_on_the_architecture(tmp_path: Path, variant: dict[str, Any], file: bool) -> None:
    """AutoTokenizer of transformers takes a class of its own for some of them, whatever the folder says."""
    changed = {f"model.{name}": value for name, value in variant.items()}
    changes = {**changed, "model.layers": 2, "model.vocabulary": 300}
    own: ByteTokenizer | FileTokenizer = ByteTokenizer()
    if file:
        _trained_tokenizer(False).save(str(tmp_path / "tokenizer.json"))
        own = FileTokenizer((tmp_path / "tokenizer.json").read_bytes())
        changes |= {"data.tokenizer": str(tmp_path / "tokenizer.json"), "data.tokenizer_sha256": own.sha256}
    spec = resolve("nano", overrides=changes)
    global_model.write(tmp_path / "run", spec, 1, random_model(spec))
    export(global_model.verify(tmp_path / "run"), tmp_path / "hf", DTYPES["fp32"], GB)
    theirs = _load_tokenizer(tmp_path / "hf")
    for text in (
        "cafe\u0301",
        "caf\u00e9",
        "it's 12345",
        "  the\n\n thing ",
        "\u212b \ufb01",
        "的 é😀",
        "a\u200bb",
    ):
        assert theirs(text).input_ids == own.encode(text).tolist()
        assert theirs.decode(own.encode(text).tolist()) == text


def _assert_no_trace(folder: Path, place: Path) -> None:
    for path in folder.iterdir():
        assert str(place).encode() not in path.read_bytes(), path.name


def test_nothing_tells_where_anything_lay(tmp_path: Path) -> None:
    source = f"text:{tmp_path / 'secret-place' / 'corpus.txt'}"
    write_model(tmp_path / "run", resolve("nano", overrides={"data.source": source}))
    stored = global_model.verify(tmp_path / "run" / "checkpoint")
    export(stored, tmp_path / "hf", DTYPES["fp32"], GB, measured=Measured({0: 2.5, 1: 2.75}, 12_345))
    _assert_no_trace(tmp_path / "hf", tmp_path)
    card = (tmp_path / "hf" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    for fact in (
        "text:corpus.txt",
        stored.spec.hash,
        "12,345",
        "2.5000",
        "2.7500",
        "arxiv.org/abs/2601.02360",
    ):
        assert fact in card
    record = json.loads((tmp_path / "hf" / "hetnode_run.json").read_text())
    assert record["anchor_digests"]["1"] == stored.manifest.stages[1].anchor_digest
    assert RunSpec.from_tree(record["spec"]).model == stored.spec.model


def test_the_byte_tokenizer_is_written_as_the_library_writes_it() -> None:
    assert byte_definition() == RawTokenizer.from_str(byte_definition()).to_str(pretty=True)
