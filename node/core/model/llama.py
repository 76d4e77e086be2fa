"""One block of the LLaMA decoder: RMSNorm (before each part, or after it), RoPE attention, SwiGLU.

Shapes: b micro-batch, L tokens, d width, h heads of queries, g heads of keys and values (each serves h / g
heads of queries), e head width, f feed-forward width. Weights are [out, in], so that y = x W^T. A block's
parameters carry the short names of :func:`block_shapes`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from node.core.model.shapes import block_shapes
from protocol.spec.fixed import ROPE_TURNS
from protocol.spec.sections import ModelSpec


@lru_cache(maxsize=16)
def rotary_tables(
    model: ModelSpec, length: int, dtype: torch.dtype, device: torch.device, has_rope: bool = True
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [L, e/2] of position times frequency, or of 0. Shared by blocks; never modified."""
    # Angles are computed in float64 and converted last: bf16 cannot tell positions above 256 apart.
    # inference_mode(False): a first call during evaluation would cache tensors that autograd rejects later.
    with torch.inference_mode(False):
        frequency_e = rotary_frequencies(model) * has_rope
        angle_le = torch.outer(torch.arange(length, dtype=torch.float64), frequency_e)
        return angle_le.cos().to(device, dtype), angle_le.sin().to(device, dtype)


def rotary_frequencies(model: ModelSpec) -> Tensor:
    """Radians per position of each pair, float64 [e/2]: base^(-2i/e), stretched as the model wants it.

    "linear" divides all by the factor. "llama3" divides those by it that turn less than once within
    `rope_context` positions, keeps those that turn more than four times (:data:`ROPE_TURNS`), and passes
    from one to the other linearly in the number of turns (Llama 3.1).
    """
    pair_e = torch.arange(0, model.head_width, 2, dtype=torch.float64) / model.head_width
    frequency_e = model.rope_base**-pair_e
    if model.rope_scaling in ("none", "smollm3"):
        return frequency_e
    stretched_e = frequency_e / model.rope_factor
    if model.rope_scaling == "linear":
        return stretched_e
    turns_e = frequency_e * model.rope_context / (2 * math.pi)
    low, high = ROPE_TURNS
    kept_e = ((turns_e - low) / (high - low)).clamp(0, 1)
    return kept_e * frequency_e + (1 - kept_e) * stretched_e


def document_mask(ids_bl: Tensor, separator: int, dtype: torch.dtype) -> Tensor:
    """What is added to the scores of attention, [b, 1, L, L]: 0 where a token attends, else -inf.

    A token attends to those of its document up to itself; a separator is the first token of a document. RoPE
    depends on distances alone, so positions need not start anew. `dtype` is that of activations.
    """
    document_bl = (ids_bl == separator).cumsum(1)
    attends_bll = (document_bl[:, :, None] == document_bl[:, None, :]).tril()
    # Of the type of the scores, so that all layers share it.
    kind = ids_bl.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else dtype
    return torch.zeros_like(attends_bll, dtype=dtype).masked_fill_(~attends_bll, -torch.inf)[:, None]


def rotate(x_bhle: Tensor, cos_le: Tensor, sin_le: Tensor) -> Tensor:
    """RoPE in the half-split convention: element i rotates together with element i + e/2."""
    cos_le, sin_le = cos_le.to(x_bhle.dtype), sin_le.to(x_bhle.dtype)
    low, high = x_bhle.chunk(2, dim=-1)
    return torch.cat((low * cos_le - high * sin_le, high * cos_le + low * sin_le), dim=-1)


_OPTIONAL = ("bq", "bk", "bv", "norm_q", "norm_k")


class LlamaBlock(nn.Module):
    """Attention and feed-forward with their residual connections: [b, L, d] -> [b, L, d].

    The forward pass takes the :func:`rotary_tables` of L as arguments, because a compiled graph cannot
    contain the cache that provides them; and a :func:`document_mask`, else a token attends to all before it.

    Args:
        model: sizes and constants.
        parameters: a tensor for every name of :func:`block_shapes`; the block uses them without a copy.
    """

    norm1: nn.Parameter
    wq: nn.Parameter
    wk: nn.Parameter
    wv: nn.Parameter
    bq: nn.Parameter | None
    bk: nn.Parameter | None
    bv: nn.Parameter | None
    norm_q: nn.Parameter | None
    norm_k: nn.Parameter | None
    wo: nn.Parameter
    norm2: nn.Parameter
    w_gate: nn.Parameter
    w_up: nn.Parameter
    w_down: nn.Parameter

    def __init__(self, model: ModelSpec, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.model = model
        shapes = block_shapes(model)
        for name in (*shapes, *(each for each in _OPTIONAL if each not in shapes)):
            self.register_parameter(name, nn.Parameter(parameters[name]) if name in shapes else None)

    def forward(self, x_bld: Tensor, *where: Tensor) -> Tensor:
        if self.model.norms == "outputs":
            x_bld = x_bld + self._norm(self.attention(x_bld, *where), self.norm1)
            return x_bld + self._norm(self._feed_forward(x_bld), self.norm2)
        x_bld = x_bld + self.attention(self._norm(x_bld, self.norm1), *where)
        return x_bld + self._feed_forward(self._norm(x_bld, self.norm2))

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm over the width of `weight`, in its type: autocast leaves bf16 as it is on a CPU alone."""
        return F.rms_norm(x.to(weight.dtype), weight.shape, weight, self.model.norm_epsilon)

    def attention(
        self, x_bld: Tensor, cos_le: Tensor, sin_le: Tensor, mask_bll: Tensor | None = None
    ) -> Tensor:
        model = self.model
        q_bhle = self._heads(F.linear(x_bld, self.wq, self.bq), self.norm_q, model.heads)
        k_bgle = self._heads(F.linear(x_bld, self.wk, self.bk), self.norm_k, model.key_value_heads)
        v_bgle = self._heads(F.linear(x_bld, self.wv, self.bv), None, model.key_value_heads)
        if mask_bll is not None:  # CUDA has no fast kernel for shared heads with a mask
            share = model.heads // model.key_value_heads
            k_bgle, v_bgle = (each.repeat_interleave(share, dim=1) for each in (k_bgle, v_bgle))
        mixed_bhle = F.scaled_dot_product_attention(
            rotate(q_bhle, cos_le, sin_le),
            rotate(k_bgle, cos_le, sin_le),
            v_bgle,
            mask_bll,
            is_causal=mask_bll is None,
            enable_gqa=k_bgle.shape[1] != model.heads,
        )
        return F.linear(mixed_bhle.transpose(1, 2).flatten(2), self.wo)

    def _heads(self, x_bln: Tensor, norm: Tensor | None, heads: int) -> Tensor:
        """`x_bln`, n = heads e, as [b, heads, L, e], after RMSNorm over the width of `norm`: e or n."""
        batch, length, _ = x_bln.shape
        if norm is not None:
            x_bln = self._norm(x_bln.view(batch, length, -1, len(norm)), norm)
        return x_bln.view(batch, length, heads, -1).transpose(1, 2)

    def _feed_forward(self, x_bld: Tensor) -> Tensor:
        gated_blf = F.silu(F.linear(x_bld, self.w_gate)) * F.linear(x_bld, self.w_up)
        return F.linear(gated_blf, self.w_down)
