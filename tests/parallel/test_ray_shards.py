"""The port over real Ray actors: a training step, an export, a checkpoint, errors and a dead rank."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import harness
import numpy as np
import pytest

from megatron_agent.contracts import LossSpec
from megatron_agent.digests import digest
from megatron_agent.errors import ConfigError, MegatronAgentError
from megatron_agent.ports import PolicyShards
from megatron_agent.settings import MeshSettings, ModelSettings, TrainerSettings

PPO = LossSpec(name="ppo", settings={"clip_low": 0.2, "clip_high": 0.28})


@pytest.fixture(scope="module")
def _ray() -> Iterator[None]:
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    import ray

    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=200 * 2**20, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.usefixtures("_ray")
def test_two_ranks_from_start_to_death(tmp_path: Path) -> None:
    asyncio.run(_life_of_two_ranks(tmp_path))


async def _life_of_two_ranks(tmp_path: Path) -> None:
    import ray

    from parallel.ray_shards import RayPolicyShards, ShardError

    model = harness.write_model(tmp_path / "model", "qwen2")
    shards = await RayPolicyShards.start(
        model_path=str(model),
        model=ModelSettings(path=str(model)),
        mesh=MeshSettings(tp=2),
        trainer=TrainerSettings(),
        optimizer=harness.OPTIMIZER,
        seed=0,
        deterministic=True,
    )
    port: PolicyShards = shards
    batch = harness.pack(harness.make_rows(), 1, 3)
    first = await port.log_probs(batch)
    assert [len(values) for values in first] == [len(row) for row in batch.rows]
    assert all((values[~row.action_mask] == 0).all() for values, row in zip(first, batch.rows, strict=True))

    metrics = await port.train_step(batch, PPO)
    assert metrics.applied
    assert metrics.grad_norm > 0
    exported = await port.export(7)
    assert exported.manifest.version == 7
    for entry in exported.manifest.tensors:
        array = (await exported.buckets[entry.bucket])[entry.name]
        assert array.shape == entry.shape
        assert digest(array) == entry.digest

    await port.begin_save(tmp_path / "checkpoint")
    trained = await port.log_probs(batch)
    with pytest.raises(MegatronAgentError, match="still being written"):
        await port.begin_save(tmp_path / "another")
    await port.finish_save()
    assert np.abs(trained[0] - first[0]).max() > 0
    await shards.load_hf(model)
    assert all(np.array_equal(a, b) for a, b in zip(await port.log_probs(batch), first, strict=True))
    await port.load(tmp_path / "checkpoint")
    assert all(np.array_equal(a, b) for a, b in zip(await port.log_probs(batch), trained, strict=True))

    bad = replace(batch.rows[0], action_mask=np.ones(len(batch.rows[0]), bool))
    with pytest.raises(ValueError, match="row 0: an action token at index 0"):
        await port.train_step(replace(batch, rows=(bad, *batch.rows[1:])), PPO)
    assert (await port.train_step(batch, PPO)).applied

    os.kill((await shards.pids())[1], signal.SIGKILL)
    with pytest.raises(ShardError, match="rank 1 of the policy died"):
        await port.train_step(batch, PPO)
    await shards.close()
    assert ray.is_initialized()


def test_a_mesh_that_cannot_run_starts_no_rank(tmp_path: Path) -> None:
    from parallel.ray_shards import RayPolicyShards

    model = harness.write_model(tmp_path, "qwen2")
    with pytest.raises(ConfigError) as caught:
        asyncio.run(
            RayPolicyShards.start(
                model_path=str(model),
                model=ModelSettings(path=str(model)),
                mesh=MeshSettings(tp=3, pp=3),
                trainer=TrainerSettings(),
                optimizer=harness.OPTIMIZER,
                seed=0,
                deterministic=False,
            )
        )
    assert len(caught.value.problems) == 5
