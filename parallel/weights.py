"""Names and layouts of weights: Hugging Face on one side, megatron-core's shards on the other.

One table (`layout_of`) serves both ways. Loading reads from safetensors only the slices that a rank holds;
exporting joins the shards of all tp ranks. Both are pure: no process group is touched here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_agent.errors import ConfigError
from parallel.hf_config import Architecture
from parallel.mesh import stage_layers


class Split(Enum):
    """How tensor parallelism cuts a parameter."""

    NONE = "every tp rank holds all of it"
    ROWS = "dimension 0 is cut"
    COLUMNS = "dimension 1 is cut"
    GATE_UP = "each rank holds its rows of the gate, then its rows of the up projection"
    QKV = "each rank holds whole query groups: the queries, key and value of a group together"


@dataclass(frozen=True, slots=True)
class Layout:
    """One megatron-core parameter: its Hugging Face tensors and how they are cut."""

    hf_names: tuple[str, ...]
    split: Split


_ATTENTION, _MLP = "self_attn", "mlp"
_LAYER_TABLE: dict[str, tuple[tuple[str, ...], Split]] = {
    "input_layernorm.weight": (("input_layernorm.weight",), Split.NONE),
    "self_attention.linear_qkv.weight": (
        tuple(f"{_ATTENTION}.{x}_proj.weight" for x in "qkv"),
        Split.QKV,
    ),
    "self_attention.linear_qkv.bias": (tuple(f"{_ATTENTION}.{x}_proj.bias" for x in "qkv"), Split.QKV),
    "self_attention.q_layernorm.weight": ((f"{_ATTENTION}.q_norm.weight",), Split.NONE),
    "self_attention.k_layernorm.weight": ((f"{_ATTENTION}.k_norm.weight",), Split.NONE),
    "self_attention.linear_proj.weight": ((f"{_ATTENTION}.o_proj.weight",), Split.COLUMNS),
    "pre_mlp_layernorm.weight": (("post_attention_layernorm.weight",), Split.NONE),
    "mlp.linear_fc1.weight": ((f"{_MLP}.gate_proj.weight", f"{_MLP}.up_proj.weight"), Split.GATE_UP),
    "mlp.linear_fc2.weight": ((f"{_MLP}.down_proj.weight",), Split.COLUMNS),
}
_EMBEDDING, _HEAD = "embedding.word_embeddings.weight", "output_layer.weight"


def layout_of(name: str, arch: Architecture, first_layer: int) -> Layout:
    """Layout of the parameter `name` of a stage whose first decoder layer is `first_layer`.

    Raises KeyError for a name that the table does not know.
    """
    if name == _EMBEDDING or (name == _HEAD and arch.tied):
        return Layout(("model.embed_tokens.weight",), Split.ROWS)
    if name == _HEAD:
        return Layout(("lm_head.weight",), Split.ROWS)
    if name == "decoder.final_layernorm.weight":
        return Layout(("model.norm.weight",), Split.NONE)
    if name.startswith("decoder.layers."):
        index, _, rest = name.removeprefix("decoder.layers.").partition(".")
        if rest in _LAYER_TABLE:
            hf_names, split = _LAYER_TABLE[rest]
            prefix = f"model.layers.{first_layer + int(index)}."
            return Layout(tuple(prefix + hf_name for hf_name in hf_names), split)
    raise KeyError(f"no Hugging Face name for the parameter {name!r}")


def stage_names(arch: Architecture, stage: int, stages: int) -> Iterator[tuple[str, Layout]]:
    """Parameters of a pipeline stage that an export reads, in order, with their layouts.

    The copy of a tied embedding on the last stage is left out: every Hugging Face tensor appears once.
    """
    layers = stage_layers(stage, arch.layers, stages)
    names = [_EMBEDDING] if stage == 0 else []
    for index in range(len(layers)):
        for rest in _LAYER_TABLE:
            if ("layernorm" in rest and "self_attention" in rest and not arch.qk_norm) or (
                rest.endswith("bias") and not arch.qkv_bias
            ):
                continue
            names.append(f"decoder.layers.{index}.{rest}")
    if stage == stages - 1:
        names.append("decoder.final_layernorm.weight")
        if not arch.tied:
            names.append(_HEAD)
    for name in names:
        yield name, layout_of(name, arch, layers.start)


# ---------------------------------------- loading


class Source(Protocol):
    """Where Hugging Face tensors are read from, slice by slice."""

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str, dim: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        """`name[start:stop]` along `dim`, nothing else read."""
        ...


class SafetensorsFolder:
    """The safetensors files of a Hugging Face folder, with or without an index."""

    def __init__(self, folder: str | Path) -> None:
        """Raises ConfigError where the folder holds no safetensors."""
        from safetensors import safe_open

        folder = Path(folder)
        index = folder / "model.safetensors.index.json"
        if index.exists():
            files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        else:
            files = sorted(path.name for path in folder.glob("*.safetensors"))
        if not files:
            raise ConfigError([f"model.path: {folder} holds no .safetensors file"])
        self._folder = folder
        self._files: dict[str, Any] = {}
        for file in files:
            handle: Any = safe_open(folder / file, framework="pt")
            self._files.update(dict.fromkeys(handle.keys(), handle))

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def read(self, name: str, dim: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        window = slice(start, stop)
        part: Tensor = self._slice(name)[window] if dim == 0 else self._slice(name)[:, window]
        return part

    def _slice(self, name: str) -> Any:
        if name not in self._files:
            raise ConfigError([f"model.path: {self._folder} has no tensor {name!r}"])
        return self._files[name].get_slice(name)


def read_shard(layout: Layout, source: Source, arch: Architecture, tp_rank: int, tp: int) -> Tensor:
    """The shard that tp rank `tp_rank` of `tp` holds, in megatron-core's layout."""
    if layout.split is Split.NONE:
        return source.read(layout.hf_names[0])
    if layout.split is Split.QKV:
        return _read_qkv(layout, source, arch, tp_rank, tp)
    dim = 1 if layout.split is Split.COLUMNS else 0
    parts = []
    for name in layout.hf_names:
        each = source.shape(name)[dim] // tp
        parts.append(source.read(name, dim, tp_rank * each, (tp_rank + 1) * each))
    return torch.cat(parts)


def _read_qkv(layout: Layout, source: Source, arch: Architecture, tp_rank: int, tp: int) -> Tensor:
    """`[groups/tp * (queries per group + 2) * head_dim, ...]`."""
    groups = arch.kv_heads // tp
    parts = []
    for name, heads_per_group in zip(layout.hf_names, _heads_per_group(arch), strict=True):
        rows = groups * heads_per_group * arch.head_dim
        part = source.read(name, 0, tp_rank * rows, (tp_rank + 1) * rows)
        parts.append(part.reshape(groups, heads_per_group * arch.head_dim, *part.shape[1:]))
    return torch.cat(parts, dim=1).flatten(0, 1)


def _heads_per_group(arch: Architecture) -> tuple[int, int, int]:
    return arch.heads // arch.kv_heads, 1, 1


@torch.no_grad()
def load_weights(model: torch.nn.Module, source: Source, arch: Architecture, stage: int, stages: int,
                 tp_rank: int, tp: int) -> None:  # fmt: skip
    """Fill every parameter of a rank's `model` in place.

    Raises ConfigError where a tensor is missing or has another shape than the config says.
    """
    first = stage_layers(stage, arch.layers, stages).start
    for name, parameter in model.named_parameters():
        layout = layout_of(name, arch, first)
        shard = read_shard(layout, source, arch, tp_rank, tp)
        if shard.shape != parameter.shape:
            raise ConfigError(
                [f"model.path: {layout.hf_names[0]} gives shards {tuple(shard.shape)}, "
                 f"the config asks for {tuple(parameter.shape)}"]
            )  # fmt: skip
        parameter.copy_(shard)


# ---------------------------------------- exporting


def join_shards(layout: Layout, shards: Sequence[Tensor], arch: Architecture) -> list[tuple[str, Tensor]]:
    """Full Hugging Face tensors from the shards of all tp ranks, in order; inverse of `read_shard`."""
    names = layout.hf_names
    if layout.split is Split.NONE:
        return [(names[0], shards[0])]
    if layout.split is Split.COLUMNS:
        return [(names[0], torch.cat(list(shards), dim=1))]
    if layout.split is Split.ROWS:
        return [(names[0], torch.cat(list(shards)))]
    if layout.split is Split.GATE_UP:
        halves = [shard.chunk(2) for shard in shards]
        return [(name, torch.cat([half[i] for half in halves])) for i, name in enumerate(names)]
    joined = torch.cat(list(shards))
    sizes = [heads * arch.head_dim for heads in _heads_per_group(arch)]
    parts = torch.split(joined.reshape(arch.kv_heads, sum(sizes), *joined.shape[1:]), sizes, dim=1)
    return [(name, part.flatten(0, 1)) for name, part in zip(names, parts, strict=True)]


def shard_shape(layout: Layout, arch: Architecture, tp: int) -> tuple[int, ...]:
    """Shape of one tp rank's shard."""
    name = layout.hf_names[0]
    q_rows = (arch.heads + 2 * arch.kv_heads) * arch.head_dim // tp
    if layout.split is Split.ROWS:
        return (arch.vocab // tp, arch.hidden)
    if layout.split is Split.GATE_UP:
        return (2 * arch.intermediate // tp, arch.hidden)
    if layout.split is Split.QKV:
        return (q_rows,) if name.endswith("bias") else (q_rows, arch.hidden)
    if layout.split is Split.COLUMNS:
        width = arch.heads * arch.head_dim if _ATTENTION in name else arch.intermediate
        return (arch.hidden, width // tp)
    return (arch.head_dim,) if _ATTENTION in name else (arch.hidden,)
