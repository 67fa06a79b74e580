"""`megatron-agent train`: cold start, then reinforcement learning."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launch.checkpoints import Checkpointer, load_checkpoint
from launch.cluster import ray_cluster
from launch.cold_start import run_cold_start
from launch.config import TrainConfig, save_config
from launch.data import split_samples, task_of
from launch.evaluator import Evaluator
from launch.run_folder import RunFolder, open_run, read_state
from launch.session import (
    cpu_slots,
    model_folder,
    open_parts,
    stop_on_signals,
    text_decoder,
    training_sampling,
)
from launch.sinks import make_tracker
from megatron_agent.ledger import Ledger
from megatron_agent.ports import PolicyShards, RolloutFleet, Tracker
from megatron_agent.replay.memory import MemoryStepStore
from megatron_agent.scheduler import SampleScheduler
from megatron_agent.tracking.jsonl import JsonlTracker
from megatron_agent.train import LoopSettings, TrainingLoop

log = logging.getLogger("megatron_agent")

DONE = 0
PREEMPTED = 75


def run(config: TrainConfig) -> int:
    """Exit code: 0 done, 75 interrupted and resumable."""
    folder, checkpoint = open_run(config)
    save_config(config, folder.path / "config.yaml")
    log.info("run %s%s", folder.path, f", continuing {checkpoint.name}" if checkpoint else "")
    start_model = model_folder(config, folder.path)
    with ray_cluster(config.cluster, cpus=cpu_slots(config)):
        finished = asyncio.run(_train(config, folder, start_model, checkpoint))
    if not finished:
        log.warning("stopped and saved; the same command continues the run")
        return PREEMPTED
    folder.finish()
    log.info("done: %s", folder.path)
    return DONE


async def _train(config: TrainConfig, folder: RunFolder, start_model: Path, checkpoint: Path | None) -> bool:
    """True where the schedule ended, False where a signal did."""
    started = time.perf_counter()
    state = read_state(checkpoint) if checkpoint else {"step": 0, "cold_start_steps": 0}
    cold = state["cold_start_steps"] < config.cold_start.steps
    optimizer = config.cold_start.optimizer if cold else config.optimizer
    tracker = make_tracker(config, folder.path, text_decoder(start_model), first_step=state["step"])
    try:
        with stop_on_signals() as stop:
            async with open_parts(config, start_model, optimizer) as (shards, fleet):
                log.info("%d trainer ranks up, %.0f s", config.mesh.world_size, time.perf_counter() - started)
                async with Checkpointer(folder, shards, config.checkpoint, start_model) as saver:
                    if cold and not await _cold_start(
                        config, folder, start_model, shards, saver, checkpoint, stop
                    ):
                        return False
                    loop = _build_loop(config, shards, fleet, saver, tracker, stop)
                    if checkpoint is not None and not cold:
                        await load_checkpoint(loop, shards, checkpoint, state, config.checkpoint)
                    finished = await loop.run()
                log.info("%.0f s in all", time.perf_counter() - started)
                return finished
    finally:
        tracker.close()


async def _cold_start(
    config: TrainConfig,
    folder: RunFolder,
    start_model: Path,
    shards: PolicyShards,
    saver: Checkpointer,
    checkpoint: Path | None,
    stop: asyncio.Event,
) -> bool:
    """Supervised steps, then a new optimizer. An interrupted cold start is saved and continued as well."""
    done = 0
    if checkpoint is not None:
        await shards.load(checkpoint / "shards", fully_parallel=config.checkpoint.fully_parallel)
        done = read_state(checkpoint)["cold_start_steps"]
    sink = JsonlTracker(folder.path / "cold_start.jsonl")
    try:
        done = await run_cold_start(config, start_model, shards, sink, stop, done)
    finally:
        sink.close()
    if done < config.cold_start.steps:
        await saver.save("cold_start", done, {"step": 0, "cold_start_steps": done}, hf=False)
        return False
    await shards.reset_optimizer(config.optimizer)
    return True


def _build_loop(
    config: TrainConfig,
    shards: PolicyShards,
    fleet: RolloutFleet,
    saver: Checkpointer,
    tracker: Tracker,
    stop: asyncio.Event,
) -> TrainingLoop:
    seed = config.run.seed
    sampling = training_sampling(config)
    heldout = split_samples(config, "heldout")
    evaluator = Evaluator(fleet, task_of(config), heldout, sampling, config.eval)

    async def evaluate(step: int, whole: bool) -> Mapping[str, float]:
        return (await evaluator.run(whole=whole, label=f"eval{step}")).metrics()

    async def save(step: int) -> None:
        state: dict[str, Any] = {
            "step": step,
            "cold_start_steps": config.cold_start.steps,
            "version": loop.version,
            "scheduler": loop.scheduler.state(),
            "ledger": loop.ledger.state(),
            "evaluations": loop.history.state(),
        }
        best = loop.history.best()
        await saver.save(
            "step",
            step,
            state,
            store=loop.store.snapshot(),
            best=best[0] if best and config.checkpoint.keep_best else None,
        )

    loop = TrainingLoop(
        loop_settings(config),
        shards=shards,
        fleet=fleet,
        scheduler=SampleScheduler(split_samples(config, "train"), seed),
        store=MemoryStepStore(),
        ledger=Ledger(),
        tracker=tracker,
        evaluate=evaluate,
        save=save,
        stop=stop,
    )
    return loop


def loop_settings(config: TrainConfig) -> LoopSettings:
    """What the training loop reads of a run's configuration."""
    return LoopSettings(
        algorithm=config.algorithm,
        schedule=config.schedule,
        numerics=config.numerics,
        trainer=config.trainer,
        sampling=training_sampling(config),
        dp=config.mesh.dp,
        eval=config.eval,
        checkpoint=config.checkpoint,
    )
