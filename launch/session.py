"""Puts the parts of a run together: model folder, Ray, policy shards, fleet. Closes them in reverse order."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from launch.config import TrainConfig
from megatron_agent.contracts import Sampling
from megatron_agent.settings import OptimizerSettings
from parallel.ray_shards import RayPolicyShards
from rollout.fleet import RayRolloutFleet

log = logging.getLogger("megatron_agent")

REPOSITORY = Path(__file__).resolve().parent.parent


def worker_environment() -> dict[str, str]:
    """Environment of every actor: our packages and the user's own are importable there."""
    paths = [str(REPOSITORY), os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths), "PYTHONWARNINGS": "ignore"}


def model_folder(config: TrainConfig, run: Path) -> Path:
    """The HF folder of the start policy; `tiny` is made inside the run's folder, `smollm2` is fetched."""
    if config.model.path == "smollm2":
        from launch.pretrained import smollm2_folder

        return smollm2_folder(log.info)
    if config.model.path != "tiny":
        return Path(config.model.path)
    from launch.tiny_model import make_tiny_model

    return make_tiny_model(run / "model", seed=config.run.seed)


def cpu_slots(config: TrainConfig) -> int:
    return config.mesh.world_size + config.rollout.engines + 2


async def start_shards(config: TrainConfig, folder: Path, optimizer: OptimizerSettings) -> RayPolicyShards:
    return await RayPolicyShards.start(
        model_path=str(folder),
        model=config.model,
        mesh=config.mesh,
        trainer=config.trainer,
        optimizer=optimizer,
        seed=config.run.seed,
        deterministic=config.run.deterministic,
        env_vars=worker_environment(),
    )


async def start_fleet(config: TrainConfig, folder: Path, *, load_format: str = "dummy") -> RayRolloutFleet:
    return await RayRolloutFleet.start(
        model_path=str(folder),
        settings=config.rollout,
        dtype=config.model.dtype,
        seed=config.run.seed,
        deterministic=config.run.deterministic,
        load_format=load_format,
        env_vars=worker_environment(),
    )


@asynccontextmanager
async def open_parts(
    config: TrainConfig, folder: Path, optimizer: OptimizerSettings
) -> AsyncIterator[tuple[RayPolicyShards, RayRolloutFleet]]:
    """Start shards and fleet side by side. The engines go on starting in the background: they are waited
    for by the first weight update, which hides their start behind a cold start."""
    fleet = await start_fleet(config, folder)
    try:
        shards = await start_shards(config, folder, optimizer)
        try:
            yield shards, fleet
        finally:
            await shards.close()
    finally:
        await fleet.close()


def text_decoder(folder: Path) -> Callable[[Sequence[int]], str]:
    """Ids -> text with special tokens, by the tokenizer of a HF folder."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=False))

    return decode


def training_sampling(config: TrainConfig) -> Sampling:
    """The run's sampling contract; stop tokens are those of the chat template."""
    rollout = config.rollout
    return Sampling(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_new_tokens=rollout.max_new_tokens_per_turn,
    )


@contextmanager
def stop_on_signals() -> Iterator[asyncio.Event]:
    """First SIGINT / SIGTERM: finish the step, save, exit 75. Second: stop at once."""
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    stop = asyncio.Event()

    def handle(name: str) -> None:
        if stop.is_set() and task is not None:
            log.warning("%s again: stopping at once, the last saved state is what remains", name)
            task.cancel()
            return
        log.warning("%s: finishing the step, then saving (again to stop at once)", name)
        stop.set()

    signals = (signal.SIGINT, signal.SIGTERM)
    for number in signals:
        loop.add_signal_handler(number, handle, number.name)
    try:
        yield stop
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
