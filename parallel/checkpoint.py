"""Sharded checkpoints (torch_dist) of parameters, optimizer, schedule and random state.

Rules: `begin_save` takes the state as it is and writes it from a forked process, so that training goes on;
the folder belongs to the caller and is complete when `finish` has returned on every rank; the caller writes
the commit marker. `load_checkpoint` fits a checkpoint onto another mesh. The optimizer is rebuilt from the
settings that were saved, so a checkpoint is a consistent cut whatever ran in the process before. torch loads
tensors with flipped bits without a word: beside each file lies its digest, which the ranks check first.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest, TemporalAsyncCaller
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed.checkpoint.api import CheckpointException

from megatron_agent.digests import file_digest
from megatron_agent.errors import MegatronAgentError
from megatron_agent.files import write_atomically
from megatron_agent.settings import MeshSettings, OptimizerSettings
from parallel.optimizer import PolicyOptimizer

_SUFFIX, _DIGEST_SUFFIX = ".distcp", ".xxh3_128"
_REASON_LENGTH = 160
_METADATA = {
    # The one format that loads onto every mesh with torch's Adam.
    "distrib_optim_sharding_type": "fully_reshardable",
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}


class CheckpointError(MegatronAgentError):
    """A folder that is no checkpoint of this project, or one that this mesh cannot load."""


class BackgroundSave:
    """A save under way: a process per rank writes what the rank held when it was made."""

    def __init__(self, folder: Path, request: AsyncRequest) -> None:
        self.folder = folder
        self._finalize = request.finalize_fns
        self._writer = TemporalAsyncCaller()
        if request.async_fn is not None:
            request = request._replace(async_fn=partial(_write, request.async_fn, folder, dist.get_rank()))
        self._writer.schedule_async_call(request)

    def written(self) -> bool:
        """Whether this rank's files are written. Not collective."""
        return bool(self._writer.is_current_async_call_done(no_dist=True))

    def finish(self) -> None:
        """Wait for the files of all ranks and write their index. Collective.

        Raises CheckpointError on every rank where one could not write.
        """
        self._writer.close()
        try:
            for finalize in self._finalize:
                finalize()
        except CheckpointException as error:
            raise CheckpointError(f"cannot save {self.folder}: {_reason(error)}") from error


def _write(write_files: Callable[..., None], folder: Path, rank: int, *args: Any, **kwargs: Any) -> None:
    """In the forked writer: the files of this rank, then their digests."""
    write_files(*args, **kwargs)
    for path in folder.glob(f"__{rank}_*{_SUFFIX}"):
        if path.is_file():
            write_atomically(path.with_suffix(_DIGEST_SUFFIX), file_digest(path).encode())


def _check_files(folder: Path) -> None:
    """Digest all tensor files, each by one rank. Raises CheckpointError on every rank. Collective."""
    mine = sorted(folder.glob(f"*{_SUFFIX}"))[dist.get_rank() :: dist.get_world_size()]
    wrong = [path.name for path in mine if not _intact(path)]
    everywhere: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, wrong)
    names = sorted(name for part in everywhere for name in part)
    if names:
        raise CheckpointError(f"{folder} is damaged: {', '.join(names)} is not as it was saved")


def _intact(path: Path) -> bool:
    try:
        return file_digest(path) == path.with_suffix(_DIGEST_SUFFIX).read_text()
    except (OSError, UnicodeDecodeError):
        return False


def begin_save(
    folder: Path,
    model: Any,
    optimizer: PolicyOptimizer,
    mesh: MeshSettings,
    groups: ProcessGroupCollection,
    *,
    fully_parallel: bool = True,
) -> BackgroundSave:
    """Start to write into `folder`, made where missing. With `fully_parallel` the data-parallel replicas
    share the writing; otherwise the first of them writes. Collective."""
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
    strategy: Any = TorchDistSaveShardedStrategy("torch_dist", 1)
    if fully_parallel and groups.dp_cp.size() > 1:
        strategy = FullyParallelSaveStrategyWrapper(strategy, groups.dp_cp)
    request = dist_checkpointing.save(
        state,
        str(folder),
        sharded_strategy=strategy,
        async_sharded_save=True,
        content_metadata=_METADATA,
    )
    assert request is not None
    return BackgroundSave(folder, request)


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
    folder: Path,
    model: Any,
    optimizer: PolicyOptimizer,
    mesh: MeshSettings,
    groups: ProcessGroupCollection,
    *,
    fully_parallel: bool = True,
) -> None:
    """Fill `model` and a new `optimizer` made from `read_optimizer_settings`. Collective. With
    `fully_parallel` the data-parallel replicas share the reading and exchange what they read.

    Random state is restored only on the mesh that saved it: another mesh has other ranks.
    Raises CheckpointError where the files are damaged.
    """
    trainer = _read_trainer(folder)
    _check_files(folder)
    same_mesh = all(trainer["mesh"][key] == getattr(mesh, key) for key in ("tp", "pp", "dp"))
    optimizer.allocate_state()
    wanted = _sharded_state(model, optimizer, groups, loading=True)
    if same_mesh:
        wanted["rng"] = _rng_object(groups, None)
    try:
        strategy: Any = get_default_load_sharded_strategy(str(folder))
        if fully_parallel and groups.dp_cp.size() > 1:
            strategy = FullyParallelLoadStrategyWrapper(strategy, groups.dp_cp)
        state = dist_checkpointing.load(wanted, str(folder), sharded_strategy=strategy)
    except (Exception, CheckpointException) as error:
        raise CheckpointError(f"{folder} is damaged or does not fit: {_reason(error)}") from error
    model.load_state_dict(state["model"], strict=False)
    applied_steps = int(trainer["applied_steps"])
    _add_missing_step(state["optimizer"], applied_steps)
    optimizer.megatron.load_state_dict(state["optimizer"])
    optimizer.set_steps(applied_steps)
    if same_mesh:
        _set_rng_state(state["rng"])
    dist.barrier()


def _reason(error: BaseException) -> str:
    """One line. torch's CheckpointException is no Exception, and tells its causes on one rank only."""
    if isinstance(error, CheckpointException):
        causes = {_reason(cause[0]) for cause in error.failures.values()}
        return "; ".join(sorted(causes)) or "another rank failed"
    text = str(error).strip() or "no message"
    return f"{type(error).__name__}: {text.splitlines()[0][:_REASON_LENGTH]}"


def _add_missing_step(state: dict[str, Any], applied_steps: int) -> None:
    """megatron-core leaves a step of 0 out of a plain optimizer's checkpoint, and Adam's load misses it."""
    inner = state.get("optimizer", state)
    if "state" in inner:
        inner["state"].setdefault("common_step", torch.tensor(float(applied_steps)))


def _read_trainer(folder: Path) -> dict[str, Any]:
    missing = [name for name in ("metadata.json", "common.pt", ".metadata") if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(f"{folder} is not a checkpoint of the policy shards: no {', '.join(missing)}")
    try:
        common = dist_checkpointing.load_common_state_dict(str(folder))
        trainer: dict[str, Any] = common["trainer"]
    except Exception as error:
        reason = _reason(error)
        raise CheckpointError(f"{folder} is not a checkpoint of the policy shards: {reason}") from error
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
