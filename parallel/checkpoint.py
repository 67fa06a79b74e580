"""Sharded checkpoints (torch_dist) of parameters, optimizer, schedule and random state.

Rules: `save` writes into a folder that the caller owns, and is complete when it returns on every rank; the
caller writes the commit marker. `load` fits a checkpoint onto another mesh. The optimizer is rebuilt from
the settings that were saved, so a checkpoint is a consistent cut whatever ran in the process before.
"""

from __future__ import annotations

import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_agent.errors import MegatronAgentError
from megatron_agent.settings import MeshSettings, OptimizerSettings
from parallel.optimizer import PolicyOptimizer

_METADATA = {
    # The one format that loads onto every mesh with torch's Adam.
    "distrib_optim_sharding_type": "fully_reshardable",
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}


class CheckpointError(MegatronAgentError):
    """A folder that is no checkpoint of this project, or one that this mesh cannot load."""


def save_checkpoint(
    folder: Path, model: Any, optimizer: PolicyOptimizer, mesh: MeshSettings, groups: ProcessGroupCollection
) -> None:
    """Write into `folder`, made where missing. Collective."""
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    optimizer.allocate_state()
    state = _sharded_state(model, optimizer, groups, loading=False)
    state["trainer"] = {
        "applied_steps": optimizer.applied_steps,
        "optimizer_settings": asdict(optimizer.settings),
        "mesh": asdict(mesh),
    }
    state["rng"] = _rng_object(groups, _rng_state())
    dist_checkpointing.save(
        state,
        str(folder),
        sharded_strategy=TorchDistSaveShardedStrategy("torch_dist", 1),
        content_metadata=_METADATA,
    )
    dist.barrier()


def read_optimizer_settings(folder: Path, mesh: MeshSettings) -> OptimizerSettings:
    """Settings of the saved optimizer.

    Raises CheckpointError where `folder` is no checkpoint, or was written with another kind of optimizer.
    """
    trainer = _read_trainer(folder)
    saved = bool(trainer["mesh"]["distributed_optimizer"])
    if saved != mesh.distributed_optimizer:
        raise CheckpointError(
            f"{folder} was saved with mesh.distributed_optimizer={str(saved).lower()}; load it with the same"
        )
    return OptimizerSettings(**trainer["optimizer_settings"])


def load_checkpoint(
    folder: Path, model: Any, optimizer: PolicyOptimizer, mesh: MeshSettings, groups: ProcessGroupCollection
) -> None:
    """Fill `model` and a new `optimizer` made from `read_optimizer_settings`. Collective.

    Random state is restored only on the mesh that saved it: another mesh has other ranks.
    """
    trainer = _read_trainer(folder)
    same_mesh = all(trainer["mesh"][key] == getattr(mesh, key) for key in ("tp", "pp", "dp"))
    optimizer.allocate_state()
    wanted = _sharded_state(model, optimizer, groups, loading=True)
    if same_mesh:
        wanted["rng"] = _rng_object(groups, None)
    state = dist_checkpointing.load(wanted, str(folder))
    model.load_state_dict(state["model"], strict=False)
    applied_steps = int(trainer["applied_steps"])
    _add_missing_step(state["optimizer"], applied_steps)
    optimizer.megatron.load_state_dict(state["optimizer"])
    optimizer.set_steps(applied_steps)
    if same_mesh:
        _set_rng_state(state["rng"])
    dist.barrier()


def _add_missing_step(state: dict[str, Any], applied_steps: int) -> None:
    """megatron-core leaves a step of 0 out of a plain optimizer's checkpoint, and Adam's load misses it."""
    inner = state.get("optimizer", state)
    if "state" in inner:
        inner["state"].setdefault("common_step", torch.tensor(float(applied_steps)))


def _read_trainer(folder: Path) -> dict[str, Any]:
    try:
        common = dist_checkpointing.load_common_state_dict(str(folder))
        trainer: dict[str, Any] = common["trainer"]
    except Exception as error:
        raise CheckpointError(f"{folder} is not a checkpoint of the policy shards: {error}") from error
    return trainer


def _sharded_state(
    model: Any, optimizer: PolicyOptimizer, groups: ProcessGroupCollection, loading: bool
) -> dict[str, Any]:
    # megatron-core keeps the group that it finds in the dict it is given: a dict per call, or the groups of
    # a mesh that is gone would decide who holds a replica.
    metadata = {**_METADATA, "dp_cp_group": groups.dp_cp}
    weights = model.sharded_state_dict(metadata=metadata)
    return {
        "model": weights,
        "optimizer": optimizer.megatron.sharded_state_dict(weights, is_loading=loading, metadata=metadata),
    }


def _rng_state() -> dict[str, Any]:
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_rng_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _rng_object(groups: ProcessGroupCollection, state: dict[str, Any] | None) -> ShardedObject:
    """One entry per rank."""
    shape = (groups.pp.size(), groups.tp.size(), groups.dp.size())
    place = (groups.pp.rank(), groups.tp.rank(), groups.dp.rank())
    return ShardedObject("rng", state, shape, place)
