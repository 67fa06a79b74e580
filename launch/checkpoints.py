"""Saving and loading one consistent state of a run: weights, optimizer, schedule, store, ledger, cursor."""

from __future__ import annotations

import asyncio
import logging
import time
from copy import deepcopy
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from launch.hf_folder import write_hf_folder
from launch.run_folder import STORE, RunFolder
from megatron_agent.files import write_atomically
from megatron_agent.ports import PolicyShards
from megatron_agent.settings import CheckpointSettings
from megatron_agent.train import TrainingLoop
from rollout.fleet import fetch_bucket

log = logging.getLogger("megatron_agent")

_GRACE_S = 120.0


class Checkpointer:
    """Writes the checkpoints of a run, one at a time; with `checkpoint.asynchronous` the shards are written
    while training goes on.

    As a context manager it completes the save under way. After an error it tries to, since what failed need
    not be the policy; after a second interrupt it does not.
    """

    def __init__(
        self, folder: RunFolder, shards: PolicyShards, settings: CheckpointSettings, model: Path
    ) -> None:
        """`model` is the HF folder of the start policy."""
        self._folder, self._shards, self._settings, self._model = folder, shards, settings, model
        self._saving: asyncio.Task[None] | None = None

    async def save(
        self,
        phase: str,
        step: int,
        state: dict[str, Any],
        *,
        store: bytes = b"",
        hf: bool = True,
        best: int | None = None,
    ) -> None:
        """Save `step` of `phase` (cold_start | step) unless it is saved already. With `hf` the weights are
        also written as a HF folder, for evaluation and for use elsewhere. The checkpoint of step `best` is
        kept beside the newest."""
        await self.finish()
        draft = self._folder.start_checkpoint(phase, step)
        if draft is None:
            return
        started = time.perf_counter()
        await self._shards.begin_save(draft / "shards", fully_parallel=self._settings.fully_parallel)
        if hf:
            export = await self._shards.export(state["version"])
            await write_hf_folder(export, fetch_bucket, self._model, draft / "hf")
        write_atomically(draft / STORE, store)
        self._saving = asyncio.create_task(self._complete(draft, deepcopy(state), best, started))
        if not self._settings.asynchronous:
            await self.finish()

    async def _complete(self, draft: Path, state: dict[str, Any], best: int | None, started: float) -> None:
        waited_from = time.perf_counter()
        await self._shards.finish_save()
        # In a thread: the files are read for their digests.
        saved = await asyncio.to_thread(
            self._folder.commit, draft, state, keep=self._settings.keep, best=best
        )
        now = time.perf_counter()
        log.info("saved %s, %.1f s", saved, now - started)
        if self._settings.asynchronous:
            log.info("%.1f s of them while training went on", now - waited_from)

    async def finish(self) -> None:
        """Wait for the save under way. Raises what it failed with."""
        saving, self._saving = self._saving, None
        if saving is not None:
            await saving

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            await self.finish()
        elif isinstance(error, Exception):
            try:
                async with asyncio.timeout(_GRACE_S):
                    await self.finish()
            except Exception as lost:
                log.warning("the save under way is lost: %s", lost)


async def load_checkpoint(
    loop: TrainingLoop,
    shards: PolicyShards,
    checkpoint: Path,
    state: dict[str, Any],
    settings: CheckpointSettings,
) -> None:
    """Put shards and loop where the checkpoint left them."""
    await shards.load(checkpoint / "shards", fully_parallel=settings.fully_parallel)
    loop.step = state["step"]
    # The loop publishes before it plays: that broadcast carries the saved version again.
    loop.version = state["version"] - 1
    loop.scheduler.restore(state["scheduler"])
    loop.ledger.restore(state["ledger"])
    loop.history.restore(state["evaluations"])
    loop.store.restore((checkpoint / STORE).read_bytes())
    log.info("continuing after step %d, version %d", loop.step, state["version"])
