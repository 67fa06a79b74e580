"""Rotary angles must be rounded as the engines round them: a difference raises no error, only the gap."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

from parallel.attention import _rope_table


@pytest.mark.parametrize("theta", [100.0, 10000.0, 1000000.0])
def test_rotary_tables_are_bitwise_those_of_transformers(theta):
    lengths, dim = (300, 7, 1500), 64
    bounds = (0, 300, 307, 1807)
    config = Qwen2Config(
        hidden_size=dim, num_attention_heads=1, rope_parameters={"rope_type": "default", "rope_theta": theta}
    )
    cos, sin = _rope_table(bounds, dim, theta, torch.float32, torch.device("cpu"))
    start = 0
    for length in lengths:
        reference = Qwen2RotaryEmbedding(config)(torch.zeros(1, length, dim), torch.arange(length)[None])
        for ours, theirs in zip((cos, sin), reference, strict=True):
            assert torch.equal(ours[start : start + length, 0], theirs[0, :, : dim // 2])
        start += length
