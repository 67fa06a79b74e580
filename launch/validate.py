"""What a configuration must fulfil beyond types, and what deserves a warning.

`problems` answers every violation, one line each: where (dotted key), the value found, what is allowed.
Nothing heavy is imported: names are checked against the source of the registered modules, models by their
config.json.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from launch.bounds import BOUNDS, CHOICES
from launch.config import TrainConfig
from launch.data import data_problems
from launch.manifest import COMMITTED
from launch.names import REGISTERED, known_names
from launch.run_folder import RunFolder
from launch.targets import NAMED_MODELS
from parallel.mesh import check_mesh

Rule = Callable[[TrainConfig, str], Iterator[str]]
GIB = 1 << 30
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def problems(config: TrainConfig, command: str = "train") -> list[str]:
    """Every reason why `command` cannot run with this configuration."""
    rules = WRITING_RULES if command == "data" else RULES
    return [line for rule in rules for line in rule(config, command)]


def value_of(config: TrainConfig, key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def model_config(config: TrainConfig) -> Mapping[str, Any] | None:
    """The model's Hugging Face config.json, None where there is none to read."""
    if config.model.path == "tiny":
        from launch.tiny_model import tiny_config

        return tiny_config()
    if config.model.path == "smollm2":
        from launch.pretrained import smollm2_config

        return smollm2_config()
    try:
        content = json.loads((Path(config.model.path) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if config.model.path and isinstance(content, dict) else None


# ---------------------------------------- one key at a time


def _bounds(config: TrainConfig, command: str) -> Iterator[str]:
    for key, interval in BOUNDS.items():
        value = value_of(config, key)
        if not interval.holds(value):
            yield f"{key}: found {value}, allowed: {interval}"


def _choices(config: TrainConfig, command: str) -> Iterator[str]:
    for key, allowed in CHOICES.items():
        value = value_of(config, key)
        if value not in allowed:
            yield f"{key}: found {value!r}, allowed: {' | '.join(allowed)}"


def _names(config: TrainConfig, command: str) -> Iterator[str]:
    for key, plugin in REGISTERED.items():
        name = value_of(config, key)
        if ":" in name:
            package = name.partition(":")[0].split(".")[0]
            if not re.fullmatch(r"[\w.]+:\w+", name) or importlib.util.find_spec(package) is None:
                yield f"{key}: found {name!r}, but Python finds no module {package!r} (package.module:Name)"
            continue
        known = known_names(plugin)
        if known and name not in known:
            yield f"{key}: found {name!r}, allowed: {', '.join(known)}, or your own package.module:Name"


def _run(config: TrainConfig, command: str) -> Iterator[str]:
    run = config.run
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", run.name):
        yield (
            f"run.name: found {run.name!r}, allowed: a folder name of letters, digits, '.', '_' and '-' "
            "that starts with a letter or digit (at most 128)"
        )
    folder = Path(run.dir).absolute()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not existing.is_dir():
        yield f"run.dir: found {run.dir!r}, but {existing} is a file, allowed: a folder"
    elif not os.access(existing, os.W_OK):
        yield f"run.dir: found {run.dir!r}, but {existing} is not writable"
    if run.resume not in ("auto", "never") and not (Path(run.resume) / COMMITTED).exists():
        yield f"run.resume: found {run.resume!r}, allowed: auto | never | PATH of a complete checkpoint"
    # A name that was not chosen (the recipe's) moves on to the next free one.
    chosen = command in ("train", "sft") and run.name != config.recipe
    if chosen and RunFolder(folder / run.name).finished:
        yield f"run.name: {Path(run.dir) / run.name} is a finished run, never overwritten: take another name"
    if run.deterministic and config.rollout.engines != 1:
        yield f"rollout.engines: found {config.rollout.engines}, allowed: 1 with run.deterministic=true"


# ---------------------------------------- model and mesh


def _model(config: TrainConfig, command: str) -> Iterator[str]:
    path = config.model.path
    if path in NAMED_MODELS:
        return
    allowed = (
        f"allowed: {', '.join(f'`{name}`' for name in NAMED_MODELS)} or a Hugging Face folder "
        "(config.json, tokenizer.json, *.safetensors)"
    )
    folder = Path(path)
    if not path:
        yield f"model.path: not set, {allowed}"
    elif not folder.exists():
        hub = " (names of a hub are not downloaded: give a folder)" if HUB_NAME.fullmatch(path) else ""
        yield f"model.path: found {path!r}, which does not exist{hub}, {allowed}"
    elif not folder.is_dir():
        yield f"model.path: found {path!r}, which is a file, {allowed}"
    else:
        missing = [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
        missing += [] if any(folder.glob("*.safetensors")) else ["*.safetensors"]
        if missing:
            yield f"model.path: {path!r} has no {', '.join(missing)}, {allowed}"
        elif model_config(config) is None:
            yield f"model.path: {path!r} has a config.json that is not a JSON object"


def _mesh(config: TrainConfig, command: str) -> Iterator[str]:
    model = model_config(config)
    if model is not None:
        # Counts below 1 are told by the bounds; the rest of the mesh is judged as if they were 1.
        sane = {name: max(1, getattr(config.mesh, name)) for name in ("tp", "pp", "dp", "threads_per_rank")}
        yield from check_mesh(replace(config.mesh, **sane), model)


def _context(config: TrainConfig, command: str) -> Iterator[str]:
    rollout, model = config.rollout, model_config(config) or {}
    longest = model.get("max_position_embeddings")
    if isinstance(longest, int) and rollout.max_context_tokens > longest:
        yield (
            f"rollout.max_context_tokens: found {rollout.max_context_tokens}, allowed: at most {longest} "
            "(the model's max_position_embeddings)"
        )
    if rollout.max_new_tokens_per_turn >= rollout.max_context_tokens:
        yield (
            f"rollout.max_new_tokens_per_turn: found {rollout.max_new_tokens_per_turn}, allowed: less than "
            f"rollout.max_context_tokens ({rollout.max_context_tokens}), which holds the prompt too"
        )
    needed = kv_bytes_per_token(model, config.model.dtype) * rollout.max_context_tokens
    if needed > rollout.kv_cache_gib * GIB:
        yield (
            f"rollout.kv_cache_gib: found {rollout.kv_cache_gib:g}, allowed: at least {needed / GIB:.2f} "
            f"(one context of {rollout.max_context_tokens} tokens)"
        )


def kv_bytes_per_token(model: Mapping[str, Any], dtype: str) -> int:
    """Bytes of key-value cache per token; 0 where the config does not say."""
    heads = model.get("num_attention_heads") or 0
    if not heads or "num_hidden_layers" not in model:
        return 0
    head_dim = model.get("head_dim") or model.get("hidden_size", 0) // heads
    kv_heads = model.get("num_key_value_heads") or heads
    return int(2 * model["num_hidden_layers"] * kv_heads * head_dim * (2 if dtype == "bfloat16" else 4))


# ---------------------------------------- rollout, schedule, optimizer


def _rollout(config: TrainConfig, command: str) -> Iterator[str]:
    rollout = config.rollout
    if command != "eval":
        why = "the trainer's log-probs are those of the whole vocabulary, a cut would bias every ratio"
        if 0 < rollout.top_p < 1.0:
            yield f"rollout.top_p: found {rollout.top_p:g}, allowed in training: 1 ({why})"
        if rollout.top_k > 0:
            yield f"rollout.top_k: found {rollout.top_k}, allowed in training: 0 ({why})"
    if rollout.tokens_per_iteration < rollout.max_sequences:
        yield (
            f"rollout.tokens_per_iteration: found {rollout.tokens_per_iteration}, allowed: at least "
            f"rollout.max_sequences ({rollout.max_sequences}), one token per sequence"
        )
    if rollout.engine_cores != "auto":
        yield from _cores(rollout.engine_cores)


def _cores(text: str) -> Iterator[str]:
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", text):
        yield f"rollout.engine_cores: found {text!r}, allowed: auto, or cores as 0 | 0-3 | 0,2"
    elif any(int(a) > int(b) for a, b in re.findall(r"(\d+)-(\d+)", text)):
        yield f"rollout.engine_cores: found {text!r}, a range runs from low to high"


def _schedule(config: TrainConfig, command: str) -> Iterator[str]:
    schedule, updates = config.schedule, config.algorithm.updates_per_step
    if updates >= 1 and schedule.groups_per_step % updates:
        yield (
            f"schedule.groups_per_step: found {schedule.groups_per_step}, allowed: a multiple of "
            f"algorithm.updates_per_step ({updates}), a mini-batch is whole groups"
        )
    if config.env.train_samples < schedule.groups_per_step and not config.env.train_files:
        yield (
            f"env.train_samples: found {config.env.train_samples}, allowed: at least "
            f"schedule.groups_per_step ({schedule.groups_per_step})"
        )
    for key in ("eval.samples", "eval.final_samples"):
        if value_of(config, key) > config.env.heldout_samples and not config.env.heldout_files:
            yield (
                f"{key}: found {value_of(config, key)}, allowed: at most env.heldout_samples "
                f"({config.env.heldout_samples})"
            )
    if command == "sft" and config.cold_start.steps < 1:
        yield f"cold_start.steps: found {config.cold_start.steps}, allowed for sft: at least 1"


def _optimizers(config: TrainConfig, command: str) -> Iterator[str]:
    for key, optimizer in (
        ("optimizer", config.optimizer),
        ("cold_start.optimizer", config.cold_start.optimizer),
    ):
        if optimizer is config.cold_start.optimizer and config.cold_start.steps == 0:
            continue
        if optimizer.decay_fraction > 0 and optimizer.total_steps == 0:
            yield f"{key}.total_steps: found 0, allowed with {key}.decay_fraction > 0: the number of steps"
        if 0 < optimizer.total_steps < optimizer.warmup_steps:
            yield (
                f"{key}.warmup_steps: found {optimizer.warmup_steps}, allowed: at most "
                f"{key}.total_steps ({optimizer.total_steps})"
            )
    numerics = config.numerics
    if numerics.p99_logprob_gap > numerics.max_logprob_gap:
        yield (
            f"numerics.p99_logprob_gap: found {numerics.p99_logprob_gap:g}, allowed: at most "
            f"numerics.max_logprob_gap ({numerics.max_logprob_gap:g})"
        )


def _data(config: TrainConfig, command: str) -> Iterator[str]:
    yield from data_problems(config, command)


def _tracking(config: TrainConfig, command: str) -> Iterator[str]:
    for package in ("tensorboard", "wandb"):
        if getattr(config.tracking, package):
            spec = importlib.util.find_spec(package)
            # An offline wandb leaves a folder `wandb/`, which Python takes for an empty namespace package.
            if spec is None or spec.origin is None:
                yield f"tracking.{package}: found true, but {package} is not installed"
    if config.tracking.wandb and not config.tracking.wandb_project:
        yield "tracking.wandb_project: not set, allowed: the name of a project"
    if not config.cluster.address:
        yield "cluster.address: not set, allowed: local, auto, or HOST:PORT of a running Ray"


RULES: tuple[Rule, ...] = (
    _bounds,
    _choices,
    _names,
    _run,
    _model,
    _mesh,
    _context,
    _rollout,
    _schedule,
    _optimizers,
    _tracking,
    _data,
)
WRITING_RULES: tuple[Rule, ...] = (_bounds, _choices, _names, _data)
"""What matters where only data is written."""


# ---------------------------------------- warnings


def warnings(config: TrainConfig, command: str = "train") -> list[str]:
    """What will run, but perhaps not as meant."""
    if command == "data":
        return []
    found = []
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    rollout, mesh = config.rollout, config.mesh
    # Trainer and engines take turns, so each side is held against the machine by itself.
    for side, threads in (
        ("trainer (mesh.tp x pp x dp x threads_per_rank)", mesh.world_size * mesh.threads_per_rank),
        ("fleet (rollout.engines x engine_threads)", rollout.engines * rollout.engine_threads),
    ):
        if config.cluster.address == "local" and threads > cores:
            found.append(
                f"the {side} runs {threads} threads on {cores} cores: they will slow each other down"
            )
    if config.cluster.address == "local" and re.fullmatch(r"[\d,-]+", rollout.engine_cores):
        highest = max(int(core) for core in re.findall(r"\d+", rollout.engine_cores))
        if highest >= (os.cpu_count() or 1):
            found.append(f"rollout.engine_cores names core {highest}, this machine has {os.cpu_count()}")
    if command != "train":
        return found
    if config.schedule.attempts_per_group == 1 and config.algorithm.advantage == "grpo":
        found.append(
            "schedule.attempts_per_group is 1: a group of one has no baseline, nothing will be learnt"
        )
    if config.model.path == "tiny" and config.cold_start.steps == 0:
        found.append("model.path is tiny (random weights) and cold_start.steps is 0: expect no reward at all")
    if config.model.dtype != "float32" and config.numerics.max_logprob_gap < 1e-2:
        found.append(
            f"numerics.max_logprob_gap is {config.numerics.max_logprob_gap:g}, a bar for float32: "
            f"{config.model.dtype} will break it and stop the run"
        )
    if rollout.max_context_tokens > config.trainer.tokens_per_microbatch:
        found.append(
            f"trainer.tokens_per_microbatch ({config.trainer.tokens_per_microbatch}) is less than "
            f"rollout.max_context_tokens ({rollout.max_context_tokens}): longer rows get a micro-batch each"
        )
    return found
