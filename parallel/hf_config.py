"""What the policy shards need to know of a Hugging Face config, read and checked without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_agent.errors import ConfigError

MODEL_TYPES = ("llama", "qwen2", "qwen3")
_SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "vocab_size",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Shape of a dense decoder with rotary positions, RMSNorm, grouped queries and a SwiGLU MLP."""

    model_type: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_positions: int
    rope_theta: float
    norm_epsilon: float
    tied: bool
    """Whether the output layer is the embedding."""
    qkv_bias: bool
    qk_norm: bool


def read_config(folder: str | Path) -> dict[str, Any]:
    """`config.json` of a Hugging Face folder. Raises ConfigError where there is none."""
    path = Path(folder) / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ConfigError([f"model.path: cannot read {path}: {error}"]) from error
    return config


def architecture(config: Mapping[str, Any]) -> Architecture:
    """Raises ConfigError with every reason why the config is not supported."""
    problems = check_config(config)
    if problems:
        raise ConfigError(problems)
    model_type = str(config["model_type"])
    heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
    return Architecture(
        model_type=model_type,
        layers=int(config["num_hidden_layers"]),
        hidden=hidden,
        intermediate=int(config["intermediate_size"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        vocab=int(config["vocab_size"]),
        max_positions=int(config.get("max_position_embeddings") or 4096),
        rope_theta=_rope_theta(config),
        norm_epsilon=float(config.get("rms_norm_eps", 1e-6)),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=model_type == "qwen2",
        qk_norm=model_type == "qwen3",
    )


def check_config(config: Mapping[str, Any]) -> list[str]:
    """Every reason why the shards cannot run a Hugging Face config, one line each."""
    model_type = config.get("model_type")
    if model_type not in MODEL_TYPES:
        return [f"config.model_type: {model_type!r} is not supported (allowed: {', '.join(MODEL_TYPES)})"]
    problems = []
    for key in _SIZES:
        value = config.get(key)
        if not isinstance(value, int) or value < 1:
            problems.append(f"config.{key}: {value!r} must be a positive integer")
    if problems:
        return problems
    heads, kv_heads = config["num_attention_heads"], config.get("num_key_value_heads")
    if kv_heads is not None and (kv_heads < 1 or heads % kv_heads):
        problems.append(f"config.num_key_value_heads: {kv_heads} must divide num_attention_heads {heads}")
    if not config.get("head_dim") and config["hidden_size"] % heads:
        problems.append(f"config.hidden_size: {config['hidden_size']} is not divisible by {heads} heads")
    rope = _rope_type(config)
    if rope != "default":
        problems.append(f"config.rope_parameters: rope_type {rope!r} is not supported (allowed: default)")
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        problems.append(f"config.hidden_act: {config['hidden_act']!r} is not supported (allowed: silu)")
    for key in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if config.get(key):
            problems.append(f"config.{key}: true is not supported (allowed: false)")
    return problems


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


def _rope_type(config: Mapping[str, Any]) -> str:
    rope = _rope(config)
    return str(rope.get("rope_type") or rope.get("type") or "default")


def _rope_theta(config: Mapping[str, Any]) -> float:
    return float(config.get("rope_theta") or _rope(config).get("rope_theta") or 10000.0)
