"""The resolved plan of a run, with units: what `--dry-run` prints."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.config import TrainConfig, to_yaml
from launch.data import SPLITS, files_of, outputs, sample_count
from launch.run_folder import RunFolder
from launch.targets import is_address, result_file
from launch.validate import kv_bytes_per_token, model_config
from megatron_agent.errors import ConfigError
from megatron_agent.settings import OptimizerSettings
from parallel.hf_config import Architecture, architecture

MIB, GIB = 1 << 20, 1 << 30
FP32_BYTES = 4
ADAM_BYTES = 16
"""Per parameter in fp32: the parameter, its gradient and two moments."""


@dataclass(frozen=True)
class Section:
    title: str
    lines: Sequence[tuple[str, str]]


def show_plan(config: TrainConfig, command: str = "train", target: str = "") -> None:
    """Print plan and resolved configuration to stdout: tables on a terminal, plain text otherwise."""
    sections = plan(config, command, target)
    if sys.stdout.isatty():
        _show_tables(sections)
    else:
        for section in sections:
            print(section.title)
            for label, value in section.lines:
                print(f"  {label:<22} {value}")
            print()
    print("# resolved configuration")
    print(to_yaml(config), end="")


def _show_tables(sections: Sequence[Section]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    for section in sections:
        table = Table(title=section.title, title_justify="left", show_header=False, min_width=72)
        table.add_column(style="cyan", no_wrap=True)
        table.add_column()
        for label, value in section.lines:
            table.add_row(label, Text(value))
        console.print(table)


def plan(config: TrainConfig, command: str = "train", target: str = "") -> list[Section]:
    if command == "data":
        return [_data(config)]
    sections = [_model(config), _processes(config)]
    if command in ("train", "sft"):
        sections.append(_cold_start(config))
    if command == "train":
        sections.append(_schedule(config))
    if command in ("train", "eval"):
        sections += [_rollout(config), _evaluation(config, command)]
    if command == "eval":
        lines = [("evaluated", target), ("result", str(result_file(config, target)))]
        if is_address(target):
            lines.insert(1, ("asked for", f"{config.eval.api_mode}, {config.eval.api_requests} at once"))
        sections.append(Section("Output", lines))
    else:
        sections.append(_output(config, command))
    return sections


def count_parameters(shape: Architecture) -> int:
    """Trainable parameters of the dense decoder."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = shape.hidden * (queries + 2 * keys) + queries * shape.hidden
    attention += (queries + 2 * keys) if shape.qkv_bias else 0
    attention += 2 * shape.head_dim if shape.qk_norm else 0
    layer = attention + 3 * shape.hidden * shape.intermediate + 2 * shape.hidden
    embeddings = shape.vocab * shape.hidden * (1 if shape.tied else 2)
    return embeddings + shape.layers * layer + shape.hidden


# ---------------------------------------- sections


def _model(config: TrainConfig) -> Section:
    lines = [("path", config.model.path), ("dtype", config.model.dtype)]
    content = model_config(config)
    try:
        shape = architecture(content or {})
    except ConfigError:
        return Section("Model", lines)
    count = count_parameters(shape)
    share = count / (config.mesh.tp * config.mesh.pp)
    return Section(
        "Model",
        [
            *lines,
            ("architecture", f"{shape.model_type}, {shape.layers} layers, hidden size {shape.hidden}"),
            ("attention", f"{shape.heads} heads, {shape.kv_heads} key-value heads of size {shape.head_dim}"),
            ("vocabulary", f"{shape.vocab} tokens, {'tied' if shape.tied else 'separate'} output layer"),
            ("parameters", f"{_count(count)} ({count:,})"),
            ("weights", _bytes(count * (2 if config.model.dtype == "bfloat16" else FP32_BYTES))),
            ("weights + optimizer", f"about {_bytes(share * ADAM_BYTES)} per rank (fp32 AdamW, gradients)"),
        ],
    )


def _processes(config: TrainConfig) -> Section:
    mesh, rollout = config.mesh, config.rollout
    ranks, engines = mesh.world_size, rollout.engines
    cluster = "a Ray of its own" if config.cluster.address == "local" else f"Ray at {config.cluster.address}"
    return Section(
        "Processes",
        [
            ("mesh", f"tp {mesh.tp} x pp {mesh.pp} x dp {mesh.dp} = world size {ranks}"),
            ("trainer ranks", f"{ranks}, {mesh.threads_per_rank} thread(s) each"),
            (
                "vLLM engines",
                f"{engines}, {rollout.engine_threads} thread(s) each, cores {rollout.engine_cores}",
            ),
            ("rollout worker", "1, plays all episodes"),
            (
                "threads that compute",
                f"{max(ranks * mesh.threads_per_rank, engines * rollout.engine_threads)} at once",
            ),
            ("cluster", f"{cluster}, object store {config.cluster.object_store_gib:g} GiB"),
        ],
    )


def _optimizer(optimizer: OptimizerSettings) -> str:
    text = (
        f"AdamW, learning rate {optimizer.learning_rate:g}, betas {optimizer.beta1:g} / {optimizer.beta2:g}, "
        f"weight decay {optimizer.weight_decay:g}, gradient norm clipped at {optimizer.clip_grad_norm:g}, "
        f"warm-up {optimizer.warmup_steps} steps"
    )
    if optimizer.total_steps and optimizer.decay_fraction:
        start = round(optimizer.total_steps * (1 - optimizer.decay_fraction))
        final = optimizer.learning_rate * optimizer.min_rate_fraction
        return f"{text}, linear decay from step {start} to {final:g} at step {optimizer.total_steps}"
    return f"{text}, then constant"


def _cold_start(config: TrainConfig) -> Section:
    cold = config.cold_start
    if cold.steps == 0:
        return Section("Cold start", [("steps", "0 (left out)")])
    total = cold.steps * cold.demonstrations_per_step
    return Section(
        "Cold start",
        [
            ("schedule", f"{cold.steps} steps x {cold.demonstrations_per_step} demonstrations = {total:,}"),
            ("bad habit", f"probability {cold.habit:g} at each chance"),
            ("optimizer", _optimizer(cold.optimizer)),
        ],
    )


def _schedule(config: TrainConfig) -> Section:
    schedule, algorithm = config.schedule, config.algorithm
    groups = schedule.steps * schedule.groups_per_step
    attempts = groups * schedule.attempts_per_group
    samples = sample_count(config, "train")
    epochs = groups / samples
    return Section(
        "Reinforcement learning",
        [
            ("task", f"{_origin(config, 'train')}, {samples} training samples"),
            (
                "schedule",
                f"{schedule.steps} steps x {schedule.groups_per_step} groups/step x "
                f"{schedule.attempts_per_group} attempts/group = {attempts:,} attempts ({epochs:.2f} epochs)",
            ),
            (
                "optimizer steps",
                f"{schedule.steps * algorithm.updates_per_step} ({algorithm.updates_per_step} per step, "
                f"{schedule.groups_per_step // algorithm.updates_per_step} groups each)",
            ),
            ("micro-batch", f"at most {config.trainer.tokens_per_microbatch} tokens per data-parallel rank"),
            (
                "algorithm",
                f"advantage {algorithm.advantage}, loss {algorithm.loss}, clip {algorithm.clip_low:g} / "
                f"{algorithm.clip_high:g}, equal weight per {algorithm.weighting}",
            ),
            ("optimizer", _optimizer(config.optimizer)),
            (
                "log-prob gap bars",
                f"p99 {config.numerics.p99_logprob_gap:g}, max {config.numerics.max_logprob_gap:g} nats",
            ),
        ],
    )


def _rollout(config: TrainConfig) -> Section:
    rollout = config.rollout
    per_token = kv_bytes_per_token(model_config(config) or {}, config.model.dtype)
    cache = f"{rollout.kv_cache_gib:g} GiB per engine"
    if per_token:
        cache += f" = {int(rollout.kv_cache_gib * GIB / per_token):,} tokens"
    return Section(
        "Rollout",
        [
            (
                "sampling",
                f"temperature {rollout.temperature:g}, top_p {rollout.top_p:g}, top_k {rollout.top_k}",
            ),
            (
                "episode",
                f"at most {rollout.max_turns} turns of {rollout.max_new_tokens_per_turn} tokens, "
                f"context {rollout.max_context_tokens} tokens",
            ),
            (
                "at once",
                f"{rollout.max_concurrent_episodes} episodes, {rollout.max_sequences} sequences per engine",
            ),
            ("key-value cache", cache),
        ],
    )


def _evaluation(config: TrainConfig, command: str) -> Section:
    final = config.eval.final_samples or sample_count(config, "heldout")
    whole = f"{final} held-out samples, greedy and {config.eval.attempts} sampled attempts each (pass@k)"
    origin = ("held-out samples", _origin(config, "heldout"))
    if command == "eval":
        return Section("Evaluation", [origin, ("once", whole)])
    every = config.eval.every_steps
    during = f"every {every} steps: {config.eval.samples} held-out samples" if every else "none"
    return Section("Evaluation", [origin, ("before and after", whole), ("during", during)])


def _origin(config: TrainConfig, split: str) -> str:
    """Where the samples of a split come from."""
    return ", ".join(files_of(config, split)) or config.env.name


def _data(config: TrainConfig) -> Section:
    lines = [("task", config.env.name), ("seed", str(config.run.seed))]
    counts = {"train": config.env.train_samples, "heldout": config.env.heldout_samples}
    paths = outputs(config)
    return Section("Data", lines + [(split, f"{paths[split]}, {counts[split]} samples") for split in SPLITS])


def _folder(config: TrainConfig, command: str) -> Path:
    """Where a run of this configuration writes: a name that was not chosen moves on past finished runs."""
    base = Path(config.run.dir)
    if config.run.name != config.recipe:
        return base / config.run.name
    name = config.run.name + ("-sft" if command == "sft" else "")
    names = (name if n == 1 else f"{name}-{n}" for n in itertools.count(1))
    return next(folder for folder in map(base.joinpath, names) if not RunFolder(folder).finished)


def _output(config: TrainConfig, command: str) -> Section:
    folder = _folder(config, command)
    saved = RunFolder(folder).committed()
    if config.run.resume not in ("auto", "never"):
        start = f"continue from {config.run.resume}"
    elif config.run.resume == "auto" and saved:
        start = f"continue from {saved[-1]}"
    else:
        start = "a fresh run"
    every = config.checkpoint.every_steps
    sinks = ["metrics.jsonl", "curve.png"]
    sinks += ["trajectories/"] if config.tracking.trajectories_per_step else []
    sinks += [name for name in ("tensorboard", "wandb") if getattr(config.tracking, name)]
    return Section(
        "Output",
        [
            ("folder", str(folder)),
            ("start", start),
            ("seed", f"{config.run.seed}{', deterministic' if config.run.deterministic else ''}"),
            (
                "checkpoints",
                f"{f'every {every} steps, ' if every else ''}at the end and on an interrupt; "
                f"{config.checkpoint.keep} kept",
            ),
            ("tracking", ", ".join(sinks)),
        ],
    )


def _count(number: float) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return f"{number:.0f}"


def _bytes(number: float) -> str:
    return f"{number / GIB:.2f} GiB" if number >= GIB else f"{number / MIB:.1f} MiB"
