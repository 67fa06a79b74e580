"""Supervised cold start of a run: demonstrations are played by an actor of their own, ahead of training."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from launch.config import TrainConfig
from launch.data import demonstrated_samples
from launch.session import worker_environment
from megatron_agent.contracts import Sample, TrainMetrics, Trajectory
from megatron_agent.ports import PolicyShards, Tracker
from megatron_agent.supervised import supervise
from megatron_agent.waiting import waiting_for

log = logging.getLogger("megatron_agent")

STEPS_PER_CHUNK = 30
CHUNKS_AHEAD = 2
CHUNK_DEADLINE_S = 300.0
LOG_EVERY_STEPS = 30


async def run_cold_start(
    config: TrainConfig,
    model_folder: Path,
    shards: PolicyShards,
    sink: Tracker,
    stop: asyncio.Event,
    done: int,
) -> int:
    """Train the shards on demonstrations, after the first `done` steps; returns how many are done then.

    `sink` gets the metrics of every LOG_EVERY_STEPS-th step.
    """
    total = config.cold_start.steps
    started = time.perf_counter()

    def on_step(number: int, metrics: TrainMetrics) -> None:
        step, seconds = done + number, time.perf_counter() - started
        if step % LOG_EVERY_STEPS == 0 or step == total:
            sink.log(
                step,
                {
                    "cold_start/loss": metrics.loss,
                    "cold_start/grad_norm": metrics.grad_norm,
                    "cold_start/learning_rate": metrics.learning_rate,
                    "time/cold_start_s": seconds,
                },
            )
            log.info("cold start %d/%d: loss %.3f, %.0f s", step, total, metrics.loss, seconds)

    return done + await supervise(
        shards,
        _batches(config, model_folder, done),
        dp=config.mesh.dp,
        tokens_per_microbatch=config.trainer.tokens_per_microbatch,
        on_step=on_step,
        stop=stop,
    )


def draw(config: TrainConfig) -> list[tuple[Sample, int]]:
    """(sample, solver seed) of every demonstration: shuffled passes over the demonstrated samples."""
    pool = demonstrated_samples(config)
    rng = random.Random(f"demonstrations/{config.run.seed}")
    drawn: list[tuple[Sample, int]] = []
    needed = config.cold_start.steps * config.cold_start.demonstrations_per_step
    while len(drawn) < needed:
        rng.shuffle(pool)
        drawn.extend((sample, rng.randrange(2**31)) for sample in pool)
    return drawn[:needed]


async def _batches(config: TrainConfig, model_folder: Path, done: int) -> AsyncIterator[Sequence[Trajectory]]:
    """Demonstrations of each step from `done` on; an actor plays them a few chunks ahead."""
    import ray

    from rollout.demonstrations import DemonstrationPlayer

    size = config.cold_start.demonstrations_per_step
    drawn = draw(config)[done * size :]
    chunks = [drawn[i : i + size * STEPS_PER_CHUNK] for i in range(0, len(drawn), size * STEPS_PER_CHUNK)]
    player = (
        ray.remote(DemonstrationPlayer)
        .options(num_cpus=0.1, runtime_env={"env_vars": worker_environment()})
        .remote(str(model_folder), config.env.name, config.rollout)
    )

    def ask(chunk: Sequence[tuple[Sample, int]]) -> Any:
        samples, seeds = zip(*chunk, strict=True)
        return player.play.remote(samples, seeds, config.cold_start.habit)

    try:
        pending = deque(ask(chunk) for chunk in chunks[:CHUNKS_AHEAD])
        for number in range(len(chunks)):
            async with waiting_for("demonstration player", f"chunk {number}", CHUNK_DEADLINE_S):
                played = await pending.popleft()
            if number + CHUNKS_AHEAD < len(chunks):
                pending.append(ask(chunks[number + CHUNKS_AHEAD]))
            for start in range(0, len(played), size):
                yield played[start : start + size]
    finally:
        ray.kill(player)
