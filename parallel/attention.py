"""Core attention and norm of the local layer spec: no Transformer Engine, CPU and GPU alike.

megatron-core's own local core attention refuses packed rows, and its torch norm refuses sequence parallelism.
"""

from __future__ import annotations

import math
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
    """Causal scaled-dot-product attention with grouped queries over padded (bshd) or packed (thd) rows."""

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
    ) -> None:
        super().__init__(config=config)
        if pg_collection is not None and pg_collection.cp.size() > 1:
            raise ValueError("context parallelism is not supported by PackedAttention")
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

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
        """Query `[t, heads/tp, d]` and key, value `[t, kv_heads/tp, d]` with packed rows, or
        `[s, b, ...]` without. Returns `[t, heads/tp * d]` or `[s, b, heads/tp * d]`; always causal."""
        if packed_seq_params is None:
            q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            return self._attend(q, k, v).permute(2, 0, 1, 3).flatten(2)
        bounds: list[int] = packed_seq_params.cu_seqlens_q.tolist()
        rows = [
            self._attend(*(x[start:stop].transpose(0, 1)[None] for x in (query, key, value)))
            for start, stop in pairwise(bounds)
        ]
        return torch.cat(rows, dim=2)[0].transpose(0, 1).flatten(1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """`[b, heads, s, d]` each; key and value with fewer heads where queries are grouped."""
        repeats = query.shape[1] // key.shape[1]
        if repeats > 1:
            # Expanded views keep the fused kernel; enable_gqa falls back to the unfused one on CPU.
            key, value = (_repeat_heads(x, repeats) for x in (key, value))
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=self.scale)


def _repeat_heads(x: Tensor, repeats: int) -> Tensor:
    """`[b, kv_heads, s, d]` to `[b, kv_heads * repeats, s, d]`, each head `repeats` times in a row."""
    return x.repeat_interleave(repeats, dim=1)


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm whose weight gradient is summed over tp where activations are split along the sequence."""

    weight: torch.nn.Parameter

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any
    ) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
