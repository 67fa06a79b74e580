"""`megatron-agent sft`: the cold start alone, through the same shards; gives a Hugging Face folder."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from launch.checkpoints import Checkpointer
from launch.cluster import ray_cluster
from launch.cold_start import run_cold_start
from launch.config import TrainConfig, save_config
from launch.run_folder import RunFolder, open_run, read_state
from launch.session import cpu_slots, model_folder, start_shards, stop_on_signals
from megatron_agent.tracking.jsonl import JsonlTracker

log = logging.getLogger("megatron_agent")

DONE = 0
PREEMPTED = 75


def run(config: TrainConfig) -> int:
    """Exit code: 0 done, 75 interrupted and resumable."""
    folder, checkpoint = open_run(config, suffix="-sft")
    save_config(config, folder.path / "config.yaml")
    start_model = model_folder(config, folder.path)
    with ray_cluster(config.cluster, cpus=cpu_slots(config)):
        finished = asyncio.run(_supervise(config, folder, start_model, checkpoint))
    if not finished:
        log.warning("stopped and saved; the same command continues the run")
        return PREEMPTED
    folder.finish()
    log.info("done: %s (train it on with model.path=%s cold_start.steps=0)", folder.path, folder.latest_hf())
    return DONE


async def _supervise(
    config: TrainConfig, folder: RunFolder, start_model: Path, checkpoint: Path | None
) -> bool:
    sink = JsonlTracker(folder.path / "cold_start.jsonl")
    shards = await start_shards(config, start_model, config.cold_start.optimizer)
    try:
        done = 0
        if checkpoint is not None:
            await shards.load(checkpoint / "shards", fully_parallel=config.checkpoint.fully_parallel)
            done = read_state(checkpoint)["cold_start_steps"]
        with stop_on_signals() as stop:
            done = await run_cold_start(config, start_model, shards, sink, stop, done)
        state = {"step": 0, "cold_start_steps": done, "version": 1}
        async with Checkpointer(folder, shards, config.checkpoint, start_model) as saver:
            await saver.save("cold_start", done, state)
    finally:
        sink.close()
        await shards.close()
    return done == config.cold_start.steps
