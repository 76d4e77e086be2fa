"""One block of the LLaMA decoder: pre-norm RMSNorm, RoPE attention, SwiGLU, no biases.

Shapes: b micro-batch, L tokens, d width, h heads, e = d / h head width, f feed-forward width. Weights are
[out, in], so that y = x W^T. A block's parameters carry the short names of :func:`block_shapes`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from node.model.shapes import block_shapes
from protocol.spec.sections import ModelSpec


@lru_cache(maxsize=16)
def rotary_tables(
    length: int, head_width: int, base: float, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [L, e/2] of pos / base^(2i/e). Shared by all blocks; never modified."""
    # Angles are computed in float64 and converted last: bf16 cannot tell positions above 256 apart.
    # inference_mode(False): a first call during evaluation would cache tensors that autograd rejects later.
    with torch.inference_mode(False):
        pair_e = torch.arange(0, head_width, 2, dtype=torch.float64) / head_width
        angle_le = torch.outer(torch.arange(length, dtype=torch.float64), base**-pair_e)
        return angle_le.cos().to(device, dtype), angle_le.sin().to(device, dtype)


def rotate(x_bhle: Tensor, cos_le: Tensor, sin_le: Tensor) -> Tensor:
    """RoPE in the half-split convention: element i rotates together with element i + e/2."""
    cos_le, sin_le = cos_le.to(x_bhle.dtype), sin_le.to(x_bhle.dtype)
    low, high = x_bhle.chunk(2, dim=-1)
    return torch.cat((low * cos_le - high * sin_le, high * cos_le + low * sin_le), dim=-1)


class Block(nn.Module):
    """Attention and feed-forward with their residual connections: [b, L, d] -> [b, L, d].

    The forward pass takes the :func:`rotary_tables` of L as arguments, because a compiled graph cannot
    contain the cache that provides them.

    Args:
        model: sizes and constants.
        parameters: a tensor for every name of :func:`block_shapes`; the block uses them without a copy.
    """

    norm1: nn.Parameter
    wq: nn.Parameter
    wk: nn.Parameter
    wv: nn.Parameter
    wo: nn.Parameter
    norm2: nn.Parameter
    w_gate: nn.Parameter
    w_up: nn.Parameter
    w_down: nn.Parameter

    def __init__(self, model: ModelSpec, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.model = model
        for name in block_shapes(model):
            self.register_parameter(name, nn.Parameter(parameters[name]))

    def forward(self, x_bld: Tensor, cos_le: Tensor, sin_le: Tensor) -> Tensor:
        x_bld = x_bld + self.attention(self._norm(x_bld, self.norm1), cos_le, sin_le)
        return x_bld + self._feed_forward(self._norm(x_bld, self.norm2))

    def _norm(self, x_bld: Tensor, weight_d: Tensor) -> Tensor:
        return F.rms_norm(x_bld, (self.model.width,), weight_d, self.model.norm_epsilon)

    def attention(self, x_bld: Tensor, cos_le: Tensor, sin_le: Tensor) -> Tensor:
        q_bhle, k_bhle, v_bhle = (
            F.linear(x_bld, w).view(*x_bld.shape[:2], self.model.heads, -1).transpose(1, 2)
            for w in (self.wq, self.wk, self.wv)
        )
        mixed_bhle = F.scaled_dot_product_attention(
            rotate(q_bhle, cos_le, sin_le), rotate(k_bhle, cos_le, sin_le), v_bhle, is_causal=True
        )
        return F.linear(mixed_bhle.transpose(1, 2).flatten(2), self.wo)

    def _feed_forward(self, x_bld: Tensor) -> Tensor:
        gated_blf = F.silu(F.linear(x_bld, self.w_gate)) * F.linear(x_bld, self.w_up)
        return F.linear(gated_blf, self.w_down)
