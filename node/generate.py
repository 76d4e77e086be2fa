"""Text generation with a checkpoint, and its loss on held-out data.

Both run the whole model in one process and without link compression. A model that was trained only through
compressed links has a higher loss here than with its links.

Shapes: b micro-batch, L tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from node.checkpoint.global_model import Checkpoint, require_complete
from node.core.model.stage import Stage
from node.data.stream import SampleStream
from node.data.tokenizer import Tokenizer, check_tokenizer
from protocol.errors import ErrorCode, HetnodeError


class WholeModel(nn.Module):
    """All stages in sequence: ids [b, L] -> logits [b, L, V]."""

    def __init__(self, stages: Iterable[Stage]) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)

    def forward(self, ids_bl: Tensor) -> Tensor:
        x = ids_bl
        for stage in self.stages:
            x = stage(x, ids_bl=ids_bl)
        return x


def generate(
    checkpoint: Checkpoint,
    prompt: str,
    tokens: int,
    temperature: float = 0.8,
    top_k: int = 40,
    seed: int = 0,
    tokenizer_path: str | None = None,
) -> Iterator[str]:
    """Continue `prompt` by `tokens` tokens and yield the text in pieces.

    The model sees the last L tokens. An empty prompt stands for the start of a document. Equal arguments
    give equal text on one machine. `temperature` 0 takes the most likely token, `top_k` 0 draws from all.
    `tokenizer_path` is a local copy of the run's tokenizer.json, if its path differs from the spec.

    Raises HetnodeError before the first piece: CHECKPOINT_MISSING (stages), TOKENIZER_UNREADABLE,
    TOKENIZER_MISMATCH, or BAD_OPTION for a negative number.
    """
    if tokens < 0 or not temperature >= 0 or top_k < 0:
        raise HetnodeError(
            ErrorCode.BAD_OPTION,
            f"One of tokens {tokens}, temperature {temperature} and top-k {top_k} is negative.",
            "Use 0 or more for each.",
        )
    tokenizer = check_tokenizer(checkpoint.spec, tokenizer_path)
    model = whole_model(checkpoint)
    ids = tokenizer.encode(prompt).tolist() or tokenizer.separator.tolist() or [0]
    generator = torch.Generator().manual_seed(seed % 2**64)
    return _continue(checkpoint, model, tokenizer, ids, tokens, temperature, top_k, generator)


def validation_loss(checkpoint: Checkpoint, stream: SampleStream, batches: int) -> float:
    """Mean loss in nats per token over the first `batches` micro-batches of the validation split.

    Raises HetnodeError: CHECKPOINT_MISSING if stages are missing; the errors of the stream.
    """
    model = whole_model(checkpoint)
    size = checkpoint.spec.inner.microbatch_size
    device = _device_of(model)
    samples = torch.from_numpy(stream.validation(batches * size)).long()
    total = 0.0
    with torch.inference_mode():
        for first in range(0, len(samples), size):
            sample_bl = samples[first : first + size].to(device)
            total += next_token_loss(model(sample_bl[:, :-1]), sample_bl[:, 1:]).item()
    return total / batches


def next_token_loss(logits_blv: Tensor, targets_bl: Tensor) -> Tensor:
    """Mean cross-entropy in nats per token. Targets are int64 ids: the inputs shifted by one."""
    return F.cross_entropy(logits_blv.flatten(0, 1), targets_bl.flatten())


def whole_model(checkpoint: Checkpoint) -> WholeModel:
    """All stages with the checkpoint's parameters, on their device.

    Raises CHECKPOINT_MISSING if stages are missing.
    """
    return WholeModel(stages_of(checkpoint))


def stages_of(checkpoint: Checkpoint) -> Iterator[Stage]:
    """As :func:`whole_model`, the stages alone, in their order."""
    require_complete(checkpoint)
    for each in range(checkpoint.spec.swarm.stages):
        yield Stage(checkpoint.spec, each, checkpoint.stages[each])


def _continue(
    checkpoint: Checkpoint,
    model: nn.Module,
    tokenizer: Tokenizer,
    ids: list[int],
    tokens: int,
    temperature: float,
    top_k: int,
    generator: torch.Generator,
) -> Iterator[str]:
    context = checkpoint.spec.model.context
    device = _device_of(model)
    shown = len(tokenizer.decode(ids))
    for left in reversed(range(tokens)):
        with torch.inference_mode():
            logits_blv = model(torch.tensor([ids[-context:]], device=device))
        # The model's vocabulary may be padded: the tokenizer cannot decode the extra ids.
        logits_v = logits_blv[0, -1, : tokenizer.vocabulary].float().cpu()
        ids.append(_draw(logits_v, temperature, top_k, generator))
        text = tokenizer.decode(ids)
        # An incomplete UTF-8 character decodes to U+FFFD: wait for its other bytes.
        if len(text) > shown and (not text.endswith("\ufffd") or not left):
            yield text[shown:]
            shown = len(text)


def _draw(logits_v: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits_v.argmax())
    if 0 < top_k < len(logits_v):
        cut = logits_v.topk(top_k).values[-1]
        logits_v = logits_v.masked_fill(logits_v < cut, -torch.inf)
    # Shift the largest logit to 0, so that a tiny temperature cannot overflow.
    weights_v = ((logits_v - logits_v.max()) / temperature).softmax(-1)
    return int(torch.multinomial(weights_v, 1, generator=generator))


def _device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
