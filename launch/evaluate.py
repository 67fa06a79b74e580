"""`megatron-agent eval TARGET`: held-out success of a run's last checkpoint, of a Hugging Face folder, or of
a model behind an OpenAI-compatible API. The flow, the samples and the figures are the same."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from launch.cluster import ray_cluster
from launch.config import TrainConfig
from launch.data import split_samples, task_of
from launch.evaluator import Evaluation, Evaluator, Player
from launch.run_folder import RunFolder
from launch.session import cpu_slots, model_folder, start_fleet, training_sampling
from launch.targets import is_address, is_named_model, result_file
from megatron_agent.errors import ConfigError, EngineError
from megatron_agent.evaluation import Proportion
from megatron_agent.files import write_atomically
from rollout.chat import ChatTokens
from rollout.openai_chat import ChatApiEngine, RecordedChat
from rollout.openai_client import ApiEngine, TokenApiEngine
from rollout.worker import RolloutWorker

log = logging.getLogger("megatron_agent")


def run(config: TrainConfig, target: str) -> int:
    """Print a table with 95 % intervals and write them to `result_file`. Exit code 0."""
    result = result_file(config, target)
    if is_address(target):
        policy = target
        log.info("evaluating %s on %s", policy, config.env.name)
        evaluation = asyncio.run(_evaluate_api(config, target))
    else:
        named = is_named_model(target)
        folder = model_folder(config, Path(config.run.dir) / target) if named else policy_folder(Path(target))
        policy = str(folder)
        log.info("evaluating %s on %s", policy, config.env.name)
        with ray_cluster(config.cluster, cpus=cpu_slots(config)):
            evaluation = asyncio.run(_evaluate(config, folder))
    _print(evaluation)
    result.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(result, json.dumps(_as_json(policy, config, evaluation), indent=1).encode())
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
    fleet = await start_fleet(config, folder, load_format="auto")
    try:
        await fleet.ready()
        return await _evaluator(config, fleet).run(whole=True, label="eval")
    finally:
        await fleet.close()


def _evaluator(config: TrainConfig, fleet: Player) -> Evaluator:
    heldout = split_samples(config, "heldout")
    return Evaluator(fleet, task_of(config), heldout, training_sampling(config), config.eval)


async def _evaluate_api(config: TrainConfig, address: str) -> Evaluation:
    """Play in this process, with the server as the one engine. Raises EngineError where the server cannot
    be used or answered nothing."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = str(model_folder(config, Path(scratch)))
        engine, chat = _api_engine(config, address, folder)
        try:
            await engine.connect(max_context_tokens=config.rollout.max_context_tokens)
            if isinstance(engine, TokenApiEngine):
                await engine.check_tokens(chat)
            elif isinstance(engine, ChatApiEngine):
                await engine.check_messages()
            log.info("model %s", engine.model)
            run = config.run
            worker = RolloutWorker(
                chat, [engine], config.rollout, seed=run.seed, deterministic=run.deterministic
            )
            evaluation = await _evaluator(config, worker).run(whole=True, label="eval")
        finally:
            await engine.close()
    failures = [t.outcome for group in evaluation.groups for t in group.trajectories if not t.rewarded]
    if failures and not evaluation.greedy["success"].samples:
        raise EngineError(f"no attempt was played to its end; the first failed so: {failures[0]}")
    return evaluation


def _api_engine(config: TrainConfig, address: str, folder: str) -> tuple[ApiEngine, ChatTokens]:
    options: dict[str, Any] = {
        "model": config.eval.api_model,
        "api_key": os.environ.get("OPENAI_API_KEY", ""),
        "timeout_s": config.rollout.request_timeout_s,
        "requests_at_once": config.eval.api_requests,
    }
    if config.eval.api_mode == "chat":
        recorded = RecordedChat(folder)
        return ChatApiEngine(address, recorded, **options), recorded
    return TokenApiEngine(address, **options), ChatTokens(folder)


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


def _as_json(policy: str, config: TrainConfig, evaluation: Evaluation) -> Mapping[str, object]:
    return {
        "policy": policy,
        "task": config.env.name,
        "temperature": config.rollout.temperature,
        "attempts_per_sample": config.eval.attempts,
        "greedy": {name: asdict(value) for name, value in evaluation.greedy.items()},
        "sampled": {name: asdict(value) for name, value in evaluation.sampled.items()},
    }
