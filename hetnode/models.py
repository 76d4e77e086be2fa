"""A run's model in the memory of this process. Imports torch.

Shapes: b samples, L tokens, V vocabulary.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from node.checkpoint import global_model
from node.checkpoint.global_model import Checkpoint
from node.data.tokenizer import Tokenizer, check_tokenizer, find_tokenizer
from node.generate import WholeModel, stages_of
from node.here.nodes import place_of
from node.hugging_face import importing


class LoadedModel(WholeModel):
    """All stages of a checkpoint, without compressed links: ids [b, L] -> logits [b, L, V].

    A plain module in float32, equal to what ``hetnode export`` writes: gradients flow, and parameters may be
    changed. `place` is where it was read, `spec` the specification of its run, `round_number` its last round.
    """

    def __init__(self, checkpoint: Checkpoint, place: Path) -> None:
        super().__init__(stages_of(checkpoint))
        self.place, self.spec, self.round_number = place, checkpoint.spec, checkpoint.round_number

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of its run. Raises HetnodeError TOKENIZER_UNREADABLE, TOKENIZER_MISMATCH."""
        return check_tokenizer(self.spec, find_tokenizer(self.spec.data, self.place))

    def encode(self, text: str) -> Tensor:
        """The ids [1, L] of a text, on the model's device. Raises as :attr:`tokenizer`."""
        ids = torch.tensor([self.tokenizer.encode(text).tolist()])
        return ids.to(next(self.parameters()).device)


def load(place: Path, device: torch.device | str) -> LoadedModel:
    """As :func:`hetnode.load_model`."""
    found = place_of(place)
    return LoadedModel(checkpoint_at(found, device), found)


def checkpoint_at(place: Path, device: torch.device | str = "cpu") -> Checkpoint:
    """The newest checkpoint at a run's or node's folder, or the model of a Hugging Face folder, verified.

    Raises HetnodeError CHECKPOINT_MISSING, CHECKPOINT_CORRUPT, UNSUPPORTED_MODEL, TOKENIZER_UNREADABLE.
    """
    if is_published(place):
        return importing.as_checkpoint(place, device)
    return global_model.read(global_model.find(place), device)


def is_published(place: Path) -> bool:
    """Whether `place` is the folder of a model in the layout of Hugging Face."""
    return (place / "config.json").is_file()
