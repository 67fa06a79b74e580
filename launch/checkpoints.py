"""Saving and loading one consistent state of a run: weights, optimizer, schedule, store, ledger, cursor."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from launch.hf_folder import write_hf_folder
from launch.run_folder import RunFolder
from megatron_agent.files import write_atomically
from megatron_agent.ports import PolicyShards
from megatron_agent.train import TrainingLoop
from rollout.fleet import fetch_bucket

log = logging.getLogger("megatron_agent")


async def save_checkpoint(
    folder: RunFolder,
    phase: str,
    step: int,
    shards: PolicyShards,
    state: dict[str, Any],
    *,
    store: bytes = b"",
    model: Path | None = None,
    keep: int = 2,
    best: int | None = None,
) -> None:
    """Write the checkpoint and then its commit marker. With `model` (the start policy's HF folder) the
    weights are also written as a HF folder, for evaluation and for use elsewhere. The newest `keep`
    checkpoints stay, and that of step `best`."""
    checkpoint = folder.start_checkpoint(phase, step)
    if checkpoint is None:
        return
    started = time.perf_counter()
    await shards.save(checkpoint / "shards")
    if model is not None:
        export = await shards.export(state["version"])
        await write_hf_folder(export, fetch_bucket, model, checkpoint / "hf")
    write_atomically(checkpoint / "store.bin", store)
    folder.commit(checkpoint, state, keep=keep, best=best)
    log.info("saved %s, %.1f s", checkpoint, time.perf_counter() - started)


async def load_checkpoint(
    loop: TrainingLoop, shards: PolicyShards, checkpoint: Path, state: dict[str, Any]
) -> None:
    """Put shards and loop where the checkpoint left them."""
    await shards.load(checkpoint / "shards")
    loop.step = state["step"]
    # The loop publishes before it plays: that broadcast carries the saved version again.
    loop.version = state["version"] - 1
    loop.scheduler.restore(state["scheduler"])
    loop.ledger.restore(state["ledger"])
    loop.history.restore(state["evaluations"])
    loop.store.restore((checkpoint / "store.bin").read_bytes())
    log.info("continuing after step %d, version %d", loop.step, state["version"])
