"""Supervised cold start: cross-entropy on demonstrations, through the same rows and shards as RL."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

import numpy as np

from megatron_agent.batching import build_rows, pack
from megatron_agent.contracts import Group, LossSpec, TrainMetrics, Trajectory
from megatron_agent.ports import PolicyShards

SUPERVISED = LossSpec(name="supervised")


async def supervise(
    shards: PolicyShards,
    batches: AsyncIterator[Sequence[Trajectory]],
    *,
    dp: int,
    tokens_per_microbatch: int,
    on_step: Callable[[int, TrainMetrics], None],
    stop: asyncio.Event,
) -> int:
    """One optimizer step per batch of demonstrations; every action token weighs the same.

    Returns the number of steps: fewer than batches where `stop` ended it early.
    """
    number = 0
    async for demonstrations in batches:
        if stop.is_set():
            break
        ones = {t.attempt_id: [np.ones(len(s.action_ids)) for s in t.steps] for t in demonstrations}
        group = Group(group_id="demonstrations", sample_id="", task="", trajectories=tuple(demonstrations))
        rows = build_rows([group], ones, "token")
        batch = pack(rows, dp=dp, tokens_per_microbatch=tokens_per_microbatch)
        number += 1
        on_step(number, await shards.train_step(batch, SUPERVISED))
    return number
