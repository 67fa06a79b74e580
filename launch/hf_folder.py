"""Writes a policy as a Hugging Face folder: one safetensors file per broadcast bucket, an index, and the
config, tokenizer and template of the model that the run started from."""

from __future__ import annotations

import json
import shutil
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from megatron_agent.contracts import WeightExport
from megatron_agent.files import sync_folder, write_atomically

COPIED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


async def write_hf_folder(
    export: WeightExport,
    fetch: Callable[[Any], Awaitable[Mapping[str, np.ndarray]]],
    source: Path,
    folder: Path,
) -> None:
    """Write `export` below `folder`, bucket by bucket so that one bucket is in memory at a time.

    `fetch` resolves a bucket's handle to name -> array (bfloat16 as uint16).
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in COPIED:
        if (source / name).exists():
            shutil.copyfile(source / name, folder / name)

    total = export.manifest.buckets
    weight_map: dict[str, str] = {}
    bytes_written = 0
    for index, handle in enumerate(export.buckets):
        file = f"model-{index + 1:05d}-of-{total:05d}.safetensors" if total > 1 else "model.safetensors"
        fetched = await fetch(handle)
        arrays = {
            entry.name: np.ascontiguousarray(fetched[entry.name])
            for entry in export.manifest.in_bucket(index)
        }
        tensors = {
            entry.name: safetensors.TensorSpec(
                dtype=entry.dtype,
                shape=list(entry.shape),
                data_ptr=arrays[entry.name].ctypes.data,
                data_len=arrays[entry.name].nbytes,
            )
            for entry in export.manifest.in_bucket(index)
        }
        weight_map |= dict.fromkeys(arrays, file)
        bytes_written += sum(array.nbytes for array in arrays.values())
        safetensors.serialize_file(tensors, str(folder / file), {"format": "pt"})
    if total > 1:
        index_json = {"metadata": {"total_size": bytes_written}, "weight_map": weight_map}
        write_atomically(folder / "model.safetensors.index.json", json.dumps(index_json, indent=1).encode())
    sync_folder(folder)
