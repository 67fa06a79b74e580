"""The policy behind the port `PolicyShards`: one Ray actor per rank of the mesh.

Light at module level: torch and Megatron are imported inside the actors only.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from megatron_agent.contracts import Floats, LossSpec, PackedBatch, TrainMetrics, WeightExport
from megatron_agent.errors import ConfigError, MegatronAgentError
from megatron_agent.settings import MeshSettings, ModelSettings, OptimizerSettings, TrainerSettings
from megatron_agent.waiting import waiting_for
from parallel.hf_config import read_config
from parallel.mesh import check_mesh

START_DEADLINE_S = 1800.0
CALL_DEADLINE_S = 7200.0
CPUS_PER_RANK = 0.01
"""Ranks are placed by the mesh, not by Ray's count of cores: a small machine holds more ranks than cores."""
_DEATH_GRACE_S = 10.0
_SAVE_POLL_S = 0.2


class ShardError(MegatronAgentError):
    """A rank of the policy died or failed; the shards cannot go on."""


class _Rank:
    """The actor of one rank. Everything heavy is imported in `setup`."""

    def address(self) -> tuple[str, int]:
        """Where the ranks meet: this node, and a port that is free now."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), int(probe.getsockname()[1])

    def setup(self, rank: int, address: str, port: int, **settings: Any) -> None:
        from parallel.shard import PolicyShard

        self.shard = PolicyShard()
        self.shard.setup(rank, address, port, **settings)
        self.rank = rank

    def pid(self) -> int:
        return os.getpid()

    def log_probs(self, batch: PackedBatch) -> list[Floats] | None:
        result = self.shard.log_probs(batch)
        return result if self.rank == 0 else None

    def train_step(self, batch: PackedBatch, loss: LossSpec) -> TrainMetrics:
        return self.shard.train_step(batch, loss)

    def reset_optimizer(self, settings: OptimizerSettings) -> None:
        self.shard.reset_optimizer(settings)

    def export(self, version: int) -> WeightExport | None:
        # Arrays go into the object store here, bucket by bucket: the driver only sees references.
        return self.shard.export(version, put=ray.put)

    def begin_save(self, folder: str, fully_parallel: bool) -> None:
        self.shard.begin_save(Path(folder), fully_parallel=fully_parallel)

    def save_written(self) -> bool:
        return self.shard.save_written()

    def finish_save(self) -> None:
        self.shard.finish_save()

    def load(self, folder: str, fully_parallel: bool) -> None:
        self.shard.load(Path(folder), fully_parallel=fully_parallel)

    def load_hf(self, folder: str) -> None:
        self.shard.load_hf(folder)


class RayPolicyShards:
    """Implements `PolicyShards`. Calls are collective and must not overlap; made by `start`."""

    def __init__(self, ranks: Sequence[Any]) -> None:
        self._ranks = list(ranks)
        self._turn = asyncio.Lock()

    @classmethod
    async def start(
        cls,
        *,
        model_path: str,
        model: ModelSettings,
        mesh: MeshSettings,
        trainer: TrainerSettings,
        optimizer: OptimizerSettings,
        seed: int,
        deterministic: bool,
        env_vars: Mapping[str, str] = {},
    ) -> RayPolicyShards:
        """Start and join all ranks. Ray must be running.

        Raises ConfigError with every reason why the model cannot run on the mesh, before a rank starts.
        """
        problems = check_mesh(mesh, read_config(model_path))
        if problems:
            raise ConfigError(problems)
        environment = {
            "OMP_NUM_THREADS": str(mesh.threads_per_rank),
            # megatron-core warns once per rank and missing fusion.
            "PYTHONWARNINGS": "ignore",
            **env_vars,
        }
        actor = ray.remote(_Rank).options(
            num_cpus=CPUS_PER_RANK, max_restarts=0, runtime_env={"env_vars": environment}
        )
        shards = cls([actor.remote() for _ in range(mesh.world_size)])
        try:
            [(address, port)] = await shards._each(
                "address", lambda rank: (), START_DEADLINE_S, ranks=shards._ranks[:1]
            )
            settings = {
                "model_path": model_path,
                "model": model,
                "mesh": mesh,
                "trainer": trainer,
                "optimizer": optimizer,
                "seed": seed,
                "deterministic": deterministic,
            }
            await shards._each("setup", lambda rank: (rank, address, port), START_DEADLINE_S, kwargs=settings)
        except BaseException:
            await shards.close()
            raise
        return shards

    async def log_probs(self, batch: PackedBatch) -> list[Floats]:
        result: list[Floats] = await self._all("log_probs", ray.put(batch))
        return result

    async def values(self, batch: PackedBatch) -> list[Floats]:
        """Raises ShardError: these shards hold a policy, not a critic."""
        raise ShardError("the policy shards have no value head")

    async def train_step(self, batch: PackedBatch, loss: LossSpec) -> TrainMetrics:
        result: TrainMetrics = await self._all("train_step", ray.put(batch), loss)
        return result

    async def reset_optimizer(self, settings: OptimizerSettings) -> None:
        await self._all("reset_optimizer", settings)

    async def export(self, version: int) -> WeightExport:
        """Handles are object-store references to dicts of Hugging Face name to array."""
        result: WeightExport = await self._all("export", version)
        return result

    async def begin_save(self, folder: Path, *, fully_parallel: bool = True) -> None:
        await self._all("begin_save", str(folder), fully_parallel)

    async def finish_save(self) -> None:
        """Other calls take their turn between two looks at the writers."""
        async with waiting_for("policy shards", "checkpoint writers", CALL_DEADLINE_S):
            while not all(await self._each("save_written", lambda rank: (), CALL_DEADLINE_S)):
                await asyncio.sleep(_SAVE_POLL_S)
        await self._all("finish_save")

    async def load(self, folder: Path, *, fully_parallel: bool = True) -> None:
        await self._all("load", str(folder), fully_parallel)

    async def load_hf(self, folder: str | Path) -> None:
        """Load other weights of the same architecture; the optimizer starts anew."""
        await self._all("load_hf", str(folder))

    async def pids(self) -> list[int]:
        """Process id of every rank."""
        return await self._each("pid", lambda rank: (), CALL_DEADLINE_S)

    async def close(self) -> None:
        """End all ranks."""
        for rank in self._ranks:
            ray.kill(rank, no_restart=True)

    async def _all(self, method: str, *args: Any) -> Any:
        """Call `method` on every rank; what rank 0 returns."""
        return (await self._each(method, lambda rank: args, CALL_DEADLINE_S))[0]

    async def _each(
        self,
        method: str,
        arguments: Any,
        deadline_s: float,
        kwargs: Mapping[str, Any] | None = None,
        ranks: Sequence[Any] | None = None,
    ) -> list[Any]:
        """Issue the call on all ranks before the first wait: their first act may be a collective."""
        async with self._turn:
            called = self._ranks if ranks is None else ranks
            refs = [
                getattr(rank, method).remote(*arguments(index), **(kwargs or {}))
                for index, rank in enumerate(called)
            ]
            async with waiting_for(f"policy shards ({len(refs)} ranks)", method, deadline_s):
                return await _gather(method, refs)


async def _gather(method: str, refs: Sequence[Awaitable[Any]]) -> list[Any]:
    """Results of all ranks in order.

    Raises the shard's own ValueError or MegatronAgentError as it is. Raises ShardError naming the rank that
    died: its peers fail in a collective first, so that after a failure deaths are waited for a little.
    """
    futures = [asyncio.ensure_future(_value(ref)) for ref in refs]
    _, pending = await asyncio.wait(futures, return_when=asyncio.FIRST_EXCEPTION)
    if pending:
        await asyncio.wait(pending, timeout=_DEATH_GRACE_S)
    errors = {
        rank: error
        for rank, future in enumerate(futures)
        if future.done() and (error := future.exception()) is not None
    }
    if not errors:
        return [future.result() for future in futures]
    for future in futures:
        future.cancel()
    raise _explain(method, errors)


async def _value(ref: Awaitable[Any]) -> Any:
    return await ref


def _explain(method: str, errors: Mapping[int, BaseException]) -> Exception:
    """The one error that tells most."""
    dead = [rank for rank, error in errors.items() if isinstance(error, RayActorError)]
    if dead:
        names = ", ".join(map(str, dead))
        reason = str(errors[dead[0]]).splitlines()[0]
        return ShardError(f"rank {names} of the policy died during {method}: {reason}")
    rank, error = min(errors.items())
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, ValueError | MegatronAgentError):
        return cause
    return ShardError(f"rank {rank} of the policy failed in {method}: {error}")
