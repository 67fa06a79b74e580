"""The fleet: engine actors, and a rollout worker actor that plays episodes with them.

Starting returns at once; the engines come up in the background while the trainer works, and the first weight
update or play waits for them. A weight update has two phases over all engines: every engine has staged and
checked every bucket before the first one switches, so that a faulty bucket switches none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_agent.contracts import Group, Sample, Sampling, WeightExport
from megatron_agent.errors import EngineError
from megatron_agent.settings import RolloutSettings
from megatron_agent.waiting import waiting_for
from rollout.chat import ChatTokens
from rollout.engine import available_cores, engine_environment
from rollout.ray_engine import CALLS_AT_ONCE, EngineActor, RayEngineClient
from rollout.worker import RolloutWorker


async def fetch_bucket(handle: Any) -> Mapping[str, Any]:
    """The tensors behind a bucket's handle, name to array: read-only views of the object store where Ray
    holds them."""
    import ray

    return await handle if isinstance(handle, ray.ObjectRef) else handle  # type: ignore[no-any-return]


class WorkerActor:
    """Body of the rollout worker's actor."""

    def __init__(
        self,
        model_path: str,
        engines: Sequence[tuple[str, Any]],
        settings: RolloutSettings,
        seed: int,
        deterministic: bool,
    ) -> None:
        clients = [RayEngineClient(name, actor, settings) for name, actor in engines]
        self._worker = RolloutWorker(
            ChatTokens(model_path), clients, settings, seed=seed, deterministic=deterministic
        )

    async def play(
        self, groups: Sequence[tuple[str, Sample]], attempts: int, sampling: Sampling
    ) -> list[Group]:
        return await self._worker.play(groups, attempts=attempts, sampling=sampling)

    async def counts(self) -> Mapping[str, int]:
        return dict(self._worker.counts)


class RayRolloutFleet:
    """RolloutFleet over Ray actors. Made by `start`; a running Ray is needed."""

    def __init__(
        self,
        engines: Sequence[RayEngineClient],
        worker: Any,
        settings: RolloutSettings,
        starting: Sequence[asyncio.Task[None]],
    ) -> None:
        self.engines = list(engines)
        self._worker = worker
        self._settings = settings
        self._starting = list(starting)

    @classmethod
    async def start(
        cls,
        *,
        model_path: str,
        settings: RolloutSettings,
        dtype: str,
        seed: int,
        deterministic: bool,
        load_format: str = "dummy",
        env_vars: Mapping[str, str] | None = None,
    ) -> RayRolloutFleet:
        """Begin to start the actors; `ready` waits for them. `env_vars` win over the engines' own."""
        engines, starting = [], []
        for index in range(settings.engines):
            environment = {**engine_environment(settings, index, available_cores()), **(env_vars or {})}
            name = f"engine-{index}"
            actor = _actor(EngineActor, environment).remote(name)
            client = RayEngineClient(name, actor, settings)
            coroutine = client.start(
                model_path,
                settings,
                seed=seed + index,
                dtype=dtype,
                deterministic=deterministic,
                load_format=load_format,
            )
            engines.append(client)
            starting.append(asyncio.create_task(coroutine))
        handles = [(client.name, client.actor) for client in engines]
        worker_environment = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **(env_vars or {})}
        worker = _actor(WorkerActor, worker_environment).remote(
            model_path, handles, settings, seed, deterministic
        )
        return cls(engines, worker, settings, starting)

    async def ready(self) -> None:
        """Wait until every engine serves. Raises EngineError or DeadlineExceeded (`start_timeout_s`)."""
        await asyncio.gather(*(asyncio.shield(task) for task in self._starting))

    async def play(
        self, groups: Sequence[tuple[str, Sample]], *, attempts: int, sampling: Sampling
    ) -> list[Group]:
        """As the port. Raises EngineError where the rollout worker died."""
        await self.ready()
        episodes = max(1, len(groups) * attempts)
        cause = f"{episodes} episodes"
        call = self._worker.play.remote(list(groups), attempts, sampling)
        played: list[Group] = await self._worker_call(cause, call, self._longest_play_s(episodes))
        return played

    async def update_weights(self, export: WeightExport) -> None:
        """Broadcast to every engine. Raises WeightUpdateError where an engine refused; unless its message
        says otherwise, the old version then serves on every engine."""
        await self.ready()
        version = export.manifest.version
        await _all(self._stage(engine, export) for engine in self.engines)
        await _all(engine.commit_update(version) for engine in self.engines)

    async def health(self) -> Mapping[str, Any]:
        """`engines`: health of each by name; `attempts`: the worker's counts."""
        answers = await asyncio.gather(*(engine.health() for engine in self.engines))
        counts = await self._worker_call(
            "counts", self._worker.counts.remote(), self._settings.request_timeout_s
        )
        names = [engine.name for engine in self.engines]
        return {"engines": dict(zip(names, answers, strict=True)), "attempts": counts}

    async def close(self) -> None:
        """End all processes of the fleet. Never raises."""
        import ray

        for task in self._starting:
            task.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        await asyncio.gather(*(engine.close() for engine in self.engines), return_exceptions=True)
        ray.kill(self._worker)

    async def _stage(self, engine: RayEngineClient, export: WeightExport) -> None:
        await engine.begin_update(export.manifest)
        for index, handle in enumerate(export.buckets):
            await engine.receive_bucket(export.manifest.version, index, handle)

    async def _worker_call(self, cause: str, call: Any, timeout_s: float) -> Any:
        from ray.exceptions import RayError, RayTaskError

        try:
            async with waiting_for("rollout worker", cause, timeout_s):
                return await call
        except RayTaskError as error:
            raise error.cause from error
        except RayError as error:
            raise EngineError(f"the rollout worker died: {type(error).__name__}: {error}") from error

    def _longest_play_s(self, episodes: int) -> float:
        """Seconds after which a play cannot be going on: every turn of every refill at its deadline."""
        settings = self._settings
        waves = -(-episodes // settings.max_concurrent_episodes)
        return waves * (settings.refills + 1) * settings.max_turns * settings.request_timeout_s


def _actor(body: type[Any], environment: Mapping[str, str]) -> Any:
    """Ray's factory of an actor that runs many calls at once, in an environment of its own."""
    import ray

    options = {
        "num_cpus": 1,
        "max_concurrency": CALLS_AT_ONCE,
        "runtime_env": {"env_vars": dict(environment)},
    }
    return ray.remote(body).options(**options)


async def _all(coroutines: Any) -> None:
    """Run to the end, all of them, then raise the first error."""
    results = await asyncio.gather(*coroutines, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
