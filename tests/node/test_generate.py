"""A checkpoint continues text and is measured on held-out data, in one process."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from node.checkpoint.global_model import Checkpoint
from node.core.model.init import initial_parameters
from node.core.optimizer.adamw import AdamW
from node.data.stream import open_stream
from node.generate import generate, next_token_loss, validation_loss, whole_model
from protocol.errors import ErrorCode, HetnodeError
from protocol.run_files.resolve import resolve

PHRASE = "the café is open. "
LIKELY = {"temperature": 0.0, "top_k": 0}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    path.write_text((PHRASE * 3 + "\n") * 200, encoding="utf-8")
    return f"text:{path}"


@pytest.fixture(scope="module")
def untrained(corpus: str) -> Checkpoint:
    overrides = {"data.source": corpus, "model.vocabulary": 300, "model.layers": 2}
    spec = resolve("nano", overrides=overrides)
    return Checkpoint(spec, 0, {s: initial_parameters(spec, s) for s in range(2)})


@pytest.fixture(scope="module")
def trained(untrained: Checkpoint) -> Checkpoint:
    """A model that knows the phrase by heart."""
    stages: dict[int, dict[str, Tensor]] = {
        stage: {name: tensor.clone() for name, tensor in parameters.items()}
        for stage, parameters in untrained.stages.items()
    }
    result = Checkpoint(untrained.spec, 1, stages)
    model = whole_model(result)
    stream = open_stream(untrained.spec)
    optimizer = AdamW(
        [{"params": list(model.named_parameters()), "weight_decay": 0.01}],
        lr=1e-2,
        betas=(0.9, 0.999),
        eps=1e-8,
    )
    for step in range(100):
        samples = torch.from_numpy(stream.read(range(step * 8, step * 8 + 8))).long()
        loss = next_token_loss(model(samples[:, :-1]), samples[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return result


def _text(checkpoint: Checkpoint, prompt: str, tokens: int, **options: Any) -> str:
    return "".join(generate(checkpoint, prompt, tokens, **options))


def test_a_trained_model_continues_beyond_its_context(trained: Checkpoint) -> None:
    assert trained.spec.model.context == 32
    assert _text(trained, "the", 60, **LIKELY).startswith(PHRASE[3:] + PHRASE)


def test_characters_of_several_bytes_arrive_whole(trained: Checkpoint) -> None:
    pieces = list(generate(trained, "the caf", 8, **LIKELY))
    assert pieces[0] == "é"
    assert all("\ufffd" not in piece for piece in pieces)


def test_half_a_character_at_the_very_end_is_still_shown(trained: Checkpoint) -> None:
    assert _text(trained, "the caf", 1, **LIKELY) == "\ufffd"


def test_the_seed_fixes_the_text(untrained: Checkpoint) -> None:
    texts = [_text(untrained, "a", 20, temperature=1.0, top_k=0, seed=seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_ids_that_the_tokenizer_lacks_are_never_drawn(untrained: Checkpoint) -> None:
    stages = {s: dict(parameters) for s, parameters in untrained.stages.items()}
    head = stages[1]["head"].clone()
    head[256:] *= 1e4
    stages[1]["head"] = head
    checkpoint = Checkpoint(untrained.spec, 0, stages)
    assert len(_text(checkpoint, "a", 20, temperature=1.0, top_k=0, seed=0)) > 0


def test_one_candidate_or_almost_no_temperature_is_the_most_likely_text(trained: Checkpoint) -> None:
    likely = _text(trained, "the", 20, **LIKELY)
    assert _text(trained, "the", 20, temperature=5.0, top_k=1) == likely
    assert _text(trained, "the", 20, temperature=1e-30, top_k=0) == likely


def test_an_empty_prompt_starts_a_document(trained: Checkpoint) -> None:
    assert _text(trained, "", 17, **LIKELY) == _text(trained, "\n", 17, **LIKELY)


def test_no_tokens_are_no_text(untrained: Checkpoint) -> None:
    assert _text(untrained, "a", 0) == ""


def test_validation_loss_is_that_of_the_plain_model(untrained: Checkpoint, trained: Checkpoint) -> None:
    stream = open_stream(untrained.spec)
    samples = torch.from_numpy(stream.validation(6)).long()
    model: nn.Module = whole_model(trained)
    with torch.inference_mode():
        expected = next_token_loss(model(samples[:, :-1]), samples[:, 1:]).item()
    assert trained.spec.inner.microbatch_size == 2
    assert validation_loss(trained, stream, 3) == pytest.approx(expected, rel=1e-5)
    assert validation_loss(untrained, stream, 3) == pytest.approx(math.log(300), abs=0.1)
    assert validation_loss(trained, stream, 3) < 0.5


@pytest.mark.parametrize(
    "option", [{"tokens": -1}, {"temperature": -0.5}, {"temperature": math.nan}, {"top_k": -1}]
)
def test_negative_options_are_refused_before_the_first_piece(
    untrained: Checkpoint, option: dict[str, Any]
) -> None:
    with pytest.raises(HetnodeError) as caught:
        generate(**{"checkpoint": untrained, "prompt": "a", "tokens": 1, **option})
    assert caught.value.code is ErrorCode.BAD_OPTION


def test_a_checkpoint_without_all_stages_is_refused(untrained: Checkpoint, tmp_path: Path) -> None:
    part = Checkpoint(untrained.spec, 0, {1: untrained.stages[1]})
    for attempt in (lambda: generate(part, "a", 1), lambda: validation_loss(part, open_stream(part.spec), 1)):
        with pytest.raises(HetnodeError, match="stage 0") as caught:
            attempt()
        assert caught.value.code is ErrorCode.CHECKPOINT_MISSING
