"""Weight export: gather the shards on rank 0 as full Hugging Face tensors, bucket by bucket.

Plan and transport are apart: the order of tensors, their shapes and their buckets follow from the
architecture alone; `gather` only moves bytes. Rank 0 holds one bucket at a time, the other ranks nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from numpy.typing import NDArray
from torch import Tensor

from megatron_agent.contracts import TensorEntry, WeightExport, WeightManifest
from megatron_agent.digests import digest
from parallel.hf_config import Architecture
from parallel.weights import Layout, join_shards, shard_shape, stage_names

Bucket = dict[str, NDArray[Any]]
"""Hugging Face name to array. bfloat16 travels as uint16; the manifest names the true dtype."""


@torch.no_grad()
def gather(
    model: torch.nn.Module,
    arch: Architecture,
    groups: ProcessGroupCollection,
    value: Callable[[torch.nn.Parameter], Tensor] = lambda parameter: parameter.data,
) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, full tensor) on global rank 0, nothing elsewhere. Collective.

    `value` picks what is gathered of each parameter, in the parameter's shape; its data by default.
    """
    if groups.dp.rank() != 0:
        return
    parameters = dict(model.named_parameters())
    stage, tp = groups.pp.rank(), groups.tp.size()
    for source in range(groups.pp.size()):
        for name, layout in stage_names(arch, source, groups.pp.size()):
            shards: list[Tensor] | None = None
            if stage == source:
                shards = _gather_tp(value(parameters[name]), groups.tp)
            if source != 0 and groups.tp.rank() == 0 and stage in (0, source):
                dtype = next(iter(parameters.values())).dtype if shards is None else shards[0].dtype
                shards = _send_to_first(shards, shard_shape(layout, arch, tp), dtype, source, groups)
            if stage == 0 and groups.tp.rank() == 0:
                yield from _joined(layout, shards, arch)


def _joined(layout: Layout, shards: list[Tensor] | None, arch: Architecture) -> list[tuple[str, Tensor]]:
    assert shards is not None
    return join_shards(layout, shards, arch)


def _gather_tp(shard: Tensor, group: dist.ProcessGroup) -> list[Tensor] | None:
    """All tp shards on tp rank 0, None elsewhere."""
    if group.size() == 1:
        return [shard]
    shard = shard.contiguous()
    shards = [torch.empty_like(shard) for _ in range(group.size())] if group.rank() == 0 else None
    dist.gather(shard, shards, group_dst=0, group=group)
    return shards


def _send_to_first(
    shards: list[Tensor] | None,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    source: int,
    groups: ProcessGroupCollection,
) -> list[Tensor] | None:
    """Move the shards from pipeline stage `source` to stage 0."""
    tp = groups.tp.size()
    if groups.pp.rank() == source:
        assert shards is not None
        dist.send(torch.stack(shards), group=groups.pp, group_dst=0)
        return None
    device = "cuda" if torch.cuda.is_available() else "cpu"
    received = torch.empty((tp, *shape), dtype=dtype, device=device)
    dist.recv(received, group=groups.pp, group_src=source)
    return list(received)


def export_weights(
    model: torch.nn.Module,
    arch: Architecture,
    groups: ProcessGroupCollection,
    *,
    version: int,
    bucket_bytes: int,
    put: Callable[[Bucket], Any],
) -> WeightExport | None:
    """Gather all weights into buckets of about `bucket_bytes`; each is handed to `put` as soon as it is
    full, and what `put` returns becomes its handle. The export on global rank 0, None elsewhere. Collective.
    """
    entries: list[TensorEntry] = []
    handles: list[Any] = []
    bucket: Bucket = {}
    size = 0
    for name, tensor in gather(model, arch, groups):
        array = as_array(tensor)
        if bucket and size + array.nbytes > bucket_bytes:
            handles.append(put(bucket))
            bucket, size = {}, 0
        bucket[name] = array
        size += array.nbytes
        entries.append(
            TensorEntry(
                name=name,
                shape=tuple(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                owner=0,
                bucket=len(handles),
                digest=digest(array),
            )
        )
    if dist.get_rank() != 0:
        return None
    if bucket:
        handles.append(put(bucket))
    return WeightExport(manifest=WeightManifest(version=version, tensors=tuple(entries)), buckets=handles)


def as_array(tensor: Tensor) -> NDArray[Any]:
    """A copy of `tensor` on the host; bfloat16, which numpy lacks, as uint16 with the same bytes."""
    host = tensor.detach().cpu().contiguous()
    if host.dtype is torch.bfloat16:
        host = host.view(torch.uint16)
    array: NDArray[Any] = np.array(host.numpy(), copy=True)
    return array


def from_array(array: NDArray[Any], dtype: str) -> Tensor:
    """Inverse of `as_array` for a manifest's dtype name."""
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor
