"""The mesh: all logic about which rank holds what, in one vocabulary (tp, pp, dp).

Ranks are numbered with tp fastest, then dp, then pp, as megatron-core orders them. Torch is imported only
where process groups are made, so that a configuration is checked in milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_agent.settings import MeshSettings
from parallel.hf_config import check_config


@dataclass(frozen=True, slots=True)
class Place:
    """Coordinates of one rank in the mesh."""

    tp: int
    pp: int
    dp: int


def place(rank: int, mesh: MeshSettings) -> Place:
    """Coordinates of global rank `rank`."""
    return Place(
        tp=rank % mesh.tp,
        dp=rank // mesh.tp % mesh.dp,
        pp=rank // (mesh.tp * mesh.dp),
    )


def rank_at(position: Place, mesh: MeshSettings) -> int:
    """Global rank at `position`; inverse of `place`."""
    return position.tp + mesh.tp * (position.dp + mesh.dp * position.pp)


def stage_layers(stage: int, layers: int, pp: int) -> range:
    """Global indices of the decoder layers that pipeline stage `stage` holds."""
    each = layers // pp
    return range(stage * each, (stage + 1) * each)


def check_mesh(mesh: MeshSettings, config: Mapping[str, Any]) -> list[str]:
    """Every reason why `mesh` cannot run the Hugging Face `config`, one line each: what, where, allowed."""
    problems = check_config(config)
    for name in ("tp", "pp", "dp", "threads_per_rank"):
        if getattr(mesh, name) < 1:
            problems.append(f"mesh.{name}: {getattr(mesh, name)} must be at least 1")
    if mesh.tp >= 1:
        problems += _check_divisible(mesh.tp, config)
    layers = config.get("num_hidden_layers")
    if mesh.pp >= 1 and isinstance(layers, int) and layers >= 1 and layers % mesh.pp:
        problems.append(
            f"mesh.pp: {mesh.pp} does not divide config.num_hidden_layers {layers} "
            f"(allowed: {_divisors(layers)})"
        )
    return problems


def _check_divisible(tp: int, config: Mapping[str, Any]) -> list[str]:
    """Sizes that tensor parallelism splits."""
    problems = []
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        size = config.get(key)
        if isinstance(size, int) and size >= 1 and size % tp:
            problems.append(
                f"mesh.tp: {tp} does not divide config.{key} {size} (allowed: {_divisors(size, 64)})"
            )
    return problems


def _divisors(number: int, limit: int = 1024) -> str:
    return ", ".join(str(n) for n in range(1, min(number, limit) + 1) if number % n == 0)


def init_process_groups(rank: int, mesh: MeshSettings, address: str, port: int, timeout_s: float) -> Any:
    """Join the process group of all ranks (collective) and cut it into the mesh's groups.

    Returns megatron-core's ProcessGroupCollection. A process that has already joined keeps its world and
    only gets new groups, so several meshes of one size can run in one launch. Raises ValueError where the
    running world has another size.
    """
    from datetime import timedelta

    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    if not dist.is_initialized():
        dist.init_process_group(
            "nccl" if torch.cuda.is_available() else "gloo",
            init_method=f"tcp://{address}:{port}",
            rank=rank,
            world_size=mesh.world_size,
            timeout=timedelta(seconds=timeout_s),
        )
    if dist.get_world_size() != mesh.world_size:
        raise ValueError(f"the mesh has {mesh.world_size} ranks, the running world {dist.get_world_size()}")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=mesh.tp, pipeline_model_parallel_size=mesh.pp
    )
    return ProcessGroupCollection.use_mpu_process_groups()


def destroy_process_groups() -> None:
    """Free the mesh's groups; the world stays joined."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
