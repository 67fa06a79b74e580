"""Core attention with rotary positions, and the norm, of the local layer spec: no Transformer Engine.

megatron-core's own local core attention refuses packed rows, its torch norm refuses sequence parallelism, and
its unfused rotary embedding and norm pass over their inputs about twice as often as needed.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class PackedAttention(MegatronModule):
    """Causal attention with rotary positions and grouped queries over packed (thd) rows."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        rope_theta: float,
    ) -> None:
        super().__init__(config=config)
        if pg_collection is not None and pg_collection.cp.size() > 1:
            raise ValueError("context parallelism is not supported by PackedAttention")
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.rope_theta = rope_theta

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Query `[t, heads/tp, d]`, key and value `[t, kv_heads/tp, d]`, positions not yet applied.

        Returns `[t, heads/tp * d]`. Raises ValueError for rows that are not packed.
        """
        if packed_seq_params is None:
            raise ValueError("PackedAttention needs packed rows")
        bounds = tuple(packed_seq_params.cu_seqlens_q.tolist())
        cos, sin = _rope_table(bounds, query.shape[-1], self.rope_theta, query.dtype, query.device)
        query, key = (_Rotate.apply(x, cos, sin) for x in (query, key))  # type: ignore[no-untyped-call]
        lengths = [stop - start for start, stop in pairwise(bounds)]
        if len(set(lengths)) == 1:
            shape = (len(lengths), lengths[0])
            rows = (x.view(*shape, *x.shape[1:]) for x in (query, key, value))
            return self._attend(*rows).flatten(0, 1)
        split = zip(*(torch.split(x, lengths) for x in (query, key, value)), strict=True)
        return torch.cat([self._attend(*(x[None] for x in row))[0] for row in split])

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """`[b, s, heads, d]` each, key and value with fewer heads; returns `[b, s, heads * d]`."""
        repeats = query.shape[2] // key.shape[2]
        if repeats > 1:
            key, value = (x.repeat_interleave(repeats, dim=2) for x in (key, value))
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return out.transpose(1, 2).flatten(2)


@lru_cache(maxsize=16)
def _rope_table(
    bounds: tuple[int, ...], dim: int, theta: float, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosines and sines `[t, 1, d/2]` of packed rows, the same for every layer of a micro-batch.

    Inverse frequencies are rounded before they are multiplied, as transformers and vLLM do: rounded
    otherwise, angles differ by 1e-5 at position 200, and a sharp policy's log-probs ten times more.
    """
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
    inverse_frequencies = 1.0 / theta**exponents
    positions = torch.cat(
        [torch.arange(stop - start, dtype=torch.float32, device=device) for start, stop in pairwise(bounds)]
    )
    angles = (positions[:, None] * inverse_frequencies)[:, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


class _Rotate(torch.autograd.Function):
    """Rotate the two halves of the last dimension; the gradient is the rotation back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, -sin), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x `[t, heads, d]`, cos and sin `[t, 1, d/2]`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    first, second = x.chunk(2, dim=-1)
    out_first, out_second = out.chunk(2, dim=-1)
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin)
    return out


class RMSNorm(torch.nn.Module):
    """RMSNorm whose weight gradient is summed over tp where activations are split along the sequence."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """`[..., hidden]`; statistics in float32 or wider."""
        out: Tensor = _RMSNorm.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return out


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        inverse = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        normed: Tensor = (wide * inverse).to(x.dtype)
        return normed.mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        normed, grad_wide = x * inverse, grad.to(inverse.dtype)
        grad_weight = (grad_wide * normed).flatten(0, -2).sum(dim=0)
        scaled = grad_wide * weight
        share = torch.linalg.vecdot(scaled, normed)[..., None] / x.shape[-1]
        grad_x = scaled.addcmul_(normed, share, value=-1).mul_(inverse)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None
