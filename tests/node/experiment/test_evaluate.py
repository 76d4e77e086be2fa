"""Loss, perplexity and bits per byte: the windows of a run's validation, and every byte counted once."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from node.checkpoint.global_model import Checkpoint
from node.core.worker.compute import Compute
from node.core.worker.factories import TrainerFactories
from node.data import sources
from node.data.hub import Shard
from node.data.stream import open_stream
from node.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer
from node.experiment import evaluate as evaluation
from node.experiment.evaluate import Documents, Evaluation, ForwardMode, evaluate, measured_source
from node.experiment.in_process_replica import LocalReplica, plan_of
from node.generate import next_token_loss, validation_loss, whole_model
from protocol.errors import ErrorCode, HetnodeError
from protocol.run_files.resolve import resolve
from protocol.spec.data import DataSource, DataSpec
from protocol.spec.run import RunSpec
from tests.support.models import random_model

TEXT = "".join(f"{n}: the café is open 😀 at {n * n} o'clock\n" for n in range(120))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def _model(corpus: Path, **overrides: object) -> Checkpoint:
    spec = resolve("nano", overrides={"data.source": f"text:{corpus}", "swarm.stages": 3, **overrides})
    return Checkpoint(spec, 7, random_model(spec))


def _bpe(end: bool) -> RawTokenizer:
    raw = RawTokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.post_processor = processors.ByteLevel(trim_offsets=True)
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"] if end else [],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator([TEXT], trainer)
    return raw


def _words() -> RawTokenizer:
    """One that drops blanks and changes letters before it looks them up."""
    raw = RawTokenizer(models.WordLevel({"[UNK]": 0, "the": 1, "cafe": 2, "open": 3}, unk_token="[UNK]"))
    raw.normalizer = normalizers.Sequence(
        [normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase()]
    )
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    return raw


TOKENIZERS: dict[str, Tokenizer] = {
    "byte": ByteTokenizer(),
    "bpe": FileTokenizer(_bpe(end=True).to_str().encode()),
    "words": FileTokenizer(_words().to_str().encode()),
}


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(deadline=None, max_examples=50)
@given(text=st.text(max_size=60) | st.text(alphabet=" thecaféopn😀\n\ud800", max_size=60))
def test_every_byte_of_a_text_is_counted_once(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids, nbytes = tokenizer.encode_counted(text)
    assert np.array_equal(ids, tokenizer.encode(text))
    assert ids.dtype == nbytes.dtype == np.int32
    assert len(ids) == len(nbytes)
    assert (nbytes >= 0).all()
    if len(ids):
        assert nbytes.sum() == len(text.encode(errors="replace"))


def test_separators_count_as_the_text_that_they_are() -> None:
    assert TOKENIZERS["byte"].separator_bytes.tolist() == [1]
    assert TOKENIZERS["bpe"].separator_bytes.tolist() == [0], "a special token is no text"
    newline = FileTokenizer(_bpe(end=False).to_str().encode())
    assert (newline.decode(newline.separator.tolist()), newline.separator_bytes.sum()) == ("\n", 1)


def test_the_figures_are_those_of_the_plain_model(corpus: Path) -> None:
    model = _model(corpus)
    samples = torch.from_numpy(open_stream(model.spec).validation(4)).long()
    with torch.inference_mode():
        loss = next_token_loss(whole_model(model)(samples[:, :-1]), samples[:, 1:]).item()
    found = evaluate(model, f"text:{corpus}", batches=2)
    assert found.loss == pytest.approx(loss, rel=1e-6)
    assert found.loss == pytest.approx(validation_loss(model, open_stream(model.spec), 2), rel=1e-6)
    assert found.tokens == found.bytes == 4 * 32
    assert found.perplexity == pytest.approx(math.exp(loss))
    assert found.bits_per_byte == pytest.approx(loss / math.log(2)), "a byte is a token"


@pytest.mark.parametrize("overrides", [{}, {"swarm.members": 2}, {"link.k": 0}])
def test_the_compressed_mode_is_that_of_a_pipeline(corpus: Path, overrides: dict[str, object]) -> None:
    model = _model(corpus, **{"data.validation_batches": 3, "swarm.replicas": 0, **overrides})
    parts = TrainerFactories(
        initial=lambda _, stage: {name: t.clone() for name, t in model.stages[stage].items()}
    )
    pipeline = plan_of(model.spec).replicas[0]
    assert len(pipeline.members) == model.spec.swarm.chain_length
    expected = LocalReplica(model.spec, pipeline, Compute(), open_stream(model.spec), parts).validate()
    found = evaluate(model, f"text:{corpus}", mode=ForwardMode.COMPRESSED, batches=3)
    assert found.loss == pytest.approx(expected, rel=1e-5)
    plain = evaluate(model, f"text:{corpus}", batches=3)
    assert (found.tokens, found.bytes) == (plain.tokens, plain.bytes)
    if model.spec.link.k:
        assert abs(found.loss - plain.loss) > 1e-3, "the links of this model do lose something"


def test_without_a_bound_every_window_counts_once(corpus: Path) -> None:
    model = _model(corpus)
    held_out = evaluate(model, f"text:{corpus}")
    everything = evaluate(model, f"text:{corpus}", Documents.ALL)
    documents = list(sources.open_source(f"text:{corpus}", "text").documents())
    nbytes = sum(len(each.text.encode()) + 1 for each in documents)
    assert everything.tokens == (nbytes - 1) // 32 * 32
    kept = sum(len(each.text.encode()) + 1 for each in documents if each.held_out)
    assert held_out.tokens == (kept - 1) // 32 * 32 < everything.tokens


def test_bytes_of_a_bpe_are_those_of_the_text(corpus: Path, tmp_path: Path) -> None:
    raw = _bpe(end=True)
    raw.save(str(tmp_path / "tokenizer.json"))
    overrides = {"data.tokenizer": str(tmp_path / "tokenizer.json"), "model.vocabulary": 300}
    model = _model(corpus, **overrides)
    found = evaluate(model, f"text:{corpus}", Documents.ALL)
    tokenizer = FileTokenizer((tmp_path / "tokenizer.json").read_bytes())
    documents = [each.text for each in sources.open_source(f"text:{corpus}", "text").documents()]
    ids = [int(i) for text in documents for i in (*tokenizer.encode(text), *tokenizer.separator)]
    covered = raw.decode(ids[1 : found.tokens + 1], skip_special_tokens=True)
    assert found.tokens == (len(ids) - 1) // 32 * 32
    assert abs(found.bytes - len(covered.replace("\ufffd", "").encode())) <= 6, "but for halves of characters"
    assert found.bits_per_byte == pytest.approx(found.loss * found.tokens / found.bytes / math.log(2))


def test_a_stream_is_measured_in_its_order_and_ends_with_it(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"{n} the café 😀 " * 4 for n in range(300)]

    def shards(_location: str, _files: bool) -> list[Shard]:
        return [Shard("only", lambda: iter([{"text": text} for text in texts]))]

    monkeypatch.setattr(sources, "hub_shards", shards)
    model = _model(corpus)
    few = evaluate(model, "hf:some/thing", Documents.ALL, batches=2)
    assert few.tokens == 2 * 2 * 32
    stream = b"".join(text.encode() + b"\n" for text in texts)
    sample = torch.tensor([list(stream[start : start + 33]) for start in range(0, 128, 32)])
    with torch.inference_mode():
        loss = next_token_loss(whole_model(model)(sample[:, :-1]), sample[:, 1:]).item()
    assert few.loss == pytest.approx(loss, rel=1e-6)
    everything = evaluate(model, "hf:some/thing", Documents.ALL, batches=10**6)
    assert everything.tokens == (len(stream) - 1) // 32 * 32
    with pytest.raises(HetnodeError) as caught:
        evaluate(model, "hf:some/thing")
    assert caught.value.code is ErrorCode.BAD_OPTION
    texts[:] = ["short"] * 2
    with pytest.raises(HetnodeError) as caught:
        evaluate(model, "hf:some/thing", batches=1)
    assert caught.value.code is ErrorCode.DATA_TOO_SMALL


def test_too_little_text_and_missing_stages_are_refused(corpus: Path, tmp_path: Path) -> None:
    model = _model(corpus)
    (tmp_path / "short.jsonl").write_text(json.dumps({"text": "a"}))
    with pytest.raises(HetnodeError) as caught:
        evaluate(model, f"jsonl:{tmp_path / 'short.jsonl'}", Documents.ALL)
    assert caught.value.code is ErrorCode.DATA_TOO_SMALL
    part = Checkpoint(model.spec, 7, {0: model.stages[0]})
    for mode in ForwardMode:
        with pytest.raises(HetnodeError) as caught:
            evaluate(part, f"text:{corpus}", mode=mode)
        assert caught.value.code is ErrorCode.CHECKPOINT_MISSING


def test_one_stage_has_no_links_to_measure_through(corpus: Path) -> None:
    model = _model(corpus, **{"swarm.stages": 1, "swarm.pipelines": 0})
    with pytest.raises(HetnodeError, match="one stage") as caught:
        evaluate(model, f"text:{corpus}", mode=ForwardMode.COMPRESSED)
    assert caught.value.code is ErrorCode.BAD_OPTION


def test_progress_tells_what_was_measured_so_far(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "TOKENS_TOGETHER", 64)
    model, seen = _model(corpus), list[Evaluation]()
    found = evaluate(model, f"text:{corpus}", batches=3, progress=seen.append)
    assert [each.tokens for each in seen] == [64, 128, 192]
    assert seen[-1] == found


def test_figures_beyond_floats_are_infinite_and_of_no_text_not_a_number() -> None:
    assert Evaluation(800.0, 1, 1).perplexity == math.inf
    assert math.isnan(Evaluation(1.0, 1, 0).bits_per_byte)
    assert RunSpec().initial is None


def test_the_links_of_a_run_with_tables_are_not_evaluated_without_them(corpus: Path) -> None:
    model = _model(corpus, **{"swarm.replicas": 1, "swarm.pipelines": 1, "link.table": True})
    with pytest.raises(HetnodeError, match=r"link\.table") as refused:
        evaluate(model, f"text:{corpus}", mode=ForwardMode.COMPRESSED, batches=1)
    assert refused.value.code is ErrorCode.BAD_OPTION
    assert evaluate(model, f"text:{corpus}", mode=ForwardMode.UNCOMPRESSED, batches=1).loss > 0


def test_what_a_run_with_several_sources_is_measured_on() -> None:
    mixture = [DataSource(name="a", source="text:a"), DataSource(name="b", source="text:b")]
    mixed = DataSpec(source=tuple(mixture))
    with pytest.raises(HetnodeError, match="several sources: a, b") as caught:
        measured_source(mixed, None)
    assert caught.value.code is ErrorCode.BAD_OPTION
    assert measured_source(mixed, "b") == (mixture[1], False)
    assert measured_source(mixed, "text:other")[0].source == "text:other"
    kept = DataSpec(source=tuple(mixture), validation="text:kept")
    found, is_whole = measured_source(kept, None)
    assert (found.source, is_whole) == ("text:kept", True)
    assert measured_source(kept, "validation")[1]
    assert measured_source(kept, "a") == (mixture[0], False)
    assert measured_source(DataSpec(), None) == (DataSpec().sources[0], False)
