"""`megatron-agent eval TARGET`: held-out success of a run's last checkpoint or of a Hugging Face folder."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from launch.cluster import ray_cluster
from launch.config import TrainConfig
from launch.evaluator import Evaluation, Evaluator
from launch.run_folder import RunFolder
from launch.session import cpu_slots, start_fleet, training_sampling
from megatron_agent.errors import ConfigError
from megatron_agent.evaluation import Proportion
from megatron_agent.files import write_atomically
from megatron_agent.registries import TASKS

log = logging.getLogger("megatron_agent")


def run(config: TrainConfig, target: str) -> int:
    """Print a table with 95 % intervals and write TARGET/evaluation.json. Exit code 0."""
    folder = policy_folder(Path(target))
    log.info("evaluating %s on %s", folder, config.env.name)
    with ray_cluster(config.cluster, cpus=cpu_slots(config)):
        evaluation = asyncio.run(_evaluate(config, folder))
    _print(evaluation)
    result = Path(target) / "evaluation.json"
    write_atomically(result, json.dumps(_as_json(folder, config, evaluation), indent=1).encode())
    log.info("wrote %s", result)
    return 0


def policy_folder(target: Path) -> Path:
    """HF folder of a run's newest checkpoint, or `target` itself. Raises ConfigError where neither is."""
    if (target / "config.json").exists():
        return target
    folder = RunFolder(target).latest_hf()
    if folder is None or not folder.exists():
        raise ConfigError([f"{target}: neither a Hugging Face folder nor a run with a complete checkpoint"])
    return folder


async def _evaluate(config: TrainConfig, folder: Path) -> Evaluation:
    task = TASKS.get(config.env.name)
    fleet = await start_fleet(config, folder, load_format="auto")
    try:
        await fleet.ready()
        heldout = task.samples("heldout", config.env.heldout_samples, 0)
        evaluator = Evaluator(fleet, task, heldout, training_sampling(config), config.eval)
        return await evaluator.run(whole=True, label="eval")
    finally:
        await fleet.close()


def _print(evaluation: Evaluation) -> None:
    ks = sorted(name for name in evaluation.sampled if "/" not in name)
    table = Table("held-out samples", "n", "greedy", *(f"sampled {name}" for name in ks))
    for name, greedy in evaluation.greedy.items():
        part = name.removesuffix("success")
        cells = [_cell(evaluation.sampled[part + k]) for k in ks]
        table.add_row(part.rstrip("/") or "all", str(greedy.samples), _cell(greedy), *cells)
    Console().print(table)


def _cell(value: Proportion) -> str:
    return f"{value.value:.3f} [{value.low:.3f}, {value.high:.3f}]" if value.samples else "-"


def _as_json(folder: Path, config: TrainConfig, evaluation: Evaluation) -> Mapping[str, object]:
    return {
        "policy": str(folder),
        "task": config.env.name,
        "temperature": config.rollout.temperature,
        "attempts_per_sample": config.eval.attempts,
        "greedy": {name: asdict(value) for name, value in evaluation.greedy.items()},
        "sampled": {name: asdict(value) for name, value in evaluation.sampled.items()},
    }
