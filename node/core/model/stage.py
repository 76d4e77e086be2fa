"""A stage of the model: a run of blocks, with the embedding before the first and the head after the last.

All stages of a run in sequence are the whole model: ``Stage(spec, 0)``, ``Stage(spec, 1)``, ... Shapes: b
micro-batch, L tokens, d width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from node.core.model.chunked_loss import chunked_loss
from node.core.model.init import initial_parameters
from node.core.model.llama import LlamaBlock, document_mask, rotary_tables
from node.core.model.shapes import EMBEDDING, block_shapes, parameter_shapes
from protocol.spec.run import RunSpec

RunBlock = Callable[..., Tensor]
"""The forward pass of a block: from the block and the arguments of LlamaBlock.forward to activations."""


class Stage(nn.Module):
    """The blocks of one stage.

    Args:
        spec: the run.
        stage: 0 <= stage < spec.swarm.stages.
        parameters: by canonical name, used without a copy; by default drawn from the run's seed.

    Attributes:
        run_block: runs the forward pass of a block. Set it for compilation or activation checkpointing.
    """

    run_block: RunBlock = staticmethod(LlamaBlock.__call__)

    def __init__(self, spec: RunSpec, stage: int, parameters: Mapping[str, Tensor] | None = None) -> None:
        super().__init__()
        self.spec = spec
        self.stage = stage
        self.is_first = stage == 0
        self.is_last = stage == spec.swarm.stages - 1
        initial = initial_parameters(spec, stage) if parameters is None else parameters
        if self.is_first:
            self.emb = nn.Parameter(initial[EMBEDDING])
        for layer in spec.layers_of(stage):
            of_layer = {name: initial[f"{layer}.{name}"] for name in block_shapes(spec.model)}
            self.add_module(str(layer), LlamaBlock(spec.model, of_layer))
        if self.is_last:
            self.norm_f = nn.Parameter(initial["norm_f"])
            if not spec.model.tied_head:
                self.head = nn.Parameter(initial["head"])

    def forward(self, x: Tensor, targets_bl: Tensor | None = None, ids_bl: Tensor | None = None) -> Tensor:
        """Activations [b, L, d]. At the last stage logits [b, L, V], or with targets the loss (chunked_loss).

        `x` are token ids [b, L] at stage 0, else activations [b, L, d] of the tokens `ids_bl`, which tell
        where documents begin; without them all tokens are of one.
        """
        if self.is_first:
            x = F.embedding(x, self.emb)
        model, mask = self.spec.model, []
        if ids_bl is not None and (separator := self.spec.data.separator) is not None:
            mask.append(document_mask(ids_bl, separator, x.dtype))
        rope = map(model.has_rope, self.spec.layers_of(self.stage))
        tables = [rotary_tables(model, x.shape[1], x.dtype, x.device, each) for each in rope]
        for block, of_layer in zip(self.blocks, tables, strict=True):
            x = self.run_block(block, x, *of_layer, *mask)
        if self.is_last:
            x = F.rms_norm(x, (model.width,), self.norm_f, model.norm_epsilon)
            head = self.emb if model.tied_head else self.head
            x = F.linear(x, head) if targets_bl is None else chunked_loss(x, head, targets_bl)
        return x

    @property
    def blocks(self) -> Iterator[LlamaBlock]:
        """The blocks in the order of their layers. The embedding, final norm and head are not in a block."""
        return (child for child in self.children() if isinstance(child, LlamaBlock))

    def canonical_parameters(self) -> dict[str, nn.Parameter]:
        """The live parameters by canonical name, in the order of :func:`parameter_shapes`."""
        return {name: self.get_parameter(name) for name in parameter_shapes(self.spec, self.stage)}


def backward_from(output: Tensor, gradient: Tensor) -> None:
    """Backward pass from `output`, whose gradient is `gradient`, of the same size and type.

    Gives the bits of ``torch.autograd.backward(output, gradient)``. For a check, that call imports sympy the
    first time: half a CPU second, three without compiled bytecode, and the round would wait.
    """
    torch.dot(output.flatten(), gradient.flatten()).backward()  # type: ignore[no-untyped-call]
