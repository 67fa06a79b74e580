"""`megatron-agent export RUN [OUT]`: a run's policy as a Hugging Face folder that stands alone.

Rules: OUT appears complete or not at all (written beside its place, synced, renamed); what exists is never
overwritten; the weights are copied byte for byte, after every file was read against its own header.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from launch.hf_folder import COPIED
from launch.manifest import COMMITTED
from launch.model_card import model_card, read_facts
from launch.run_folder import RunFolder, read_run_config, read_state, require_intact
from megatron_agent.errors import ConfigError
from megatron_agent.files import sync_folder
from megatron_agent.history import EvaluationHistory

log = logging.getLogger("megatron_agent")

CARD = "README.md"
INDEX = "model.safetensors.index.json"
DEFAULT_OUT = "export"


@dataclass(frozen=True)
class Source:
    """What is exported."""

    run: Path
    checkpoint: Path
    why: str
    """Why this checkpoint and not another."""

    @property
    def step(self) -> int:
        return int(self.checkpoint.name.rpartition("_")[2])


def run(target: str, out: str = "", *, dry_run: bool = False) -> int:
    """Export `target` (a run, or one of its checkpoints) to `out`, by default RUN/export. Exit code 0."""
    source = find_source(Path(target))
    require_intact(source.checkpoint, unread="shards")
    folder = Path(out) if out else source.run / DEFAULT_OUT
    if folder.exists():
        raise ConfigError([f"OUT: {folder} exists and is never overwritten; name another folder"])
    print(f"{'would export' if dry_run else 'exporting'} {source.checkpoint} ({source.why}) to {folder}")
    if not dry_run:
        export(source, folder)
        print(f"{folder}: load it with transformers or vLLM, or train on with model.path={folder}")
    return 0


def find_source(target: Path) -> Source:
    """The checkpoint that `target` stands for: the best one where the run keeps it (checkpoint.keep_best),
    otherwise the newest. Raises ConfigError where there is none to export."""
    if target.parent.name == "checkpoints" and target.is_dir():
        if not (target / COMMITTED).exists():
            raise ConfigError([f"RUN: {target} is an incomplete checkpoint (no {COMMITTED} in it)"])
        if not _has_weights(target):
            raise ConfigError([f"RUN: {target} holds no Hugging Face folder (a cold start cut short)"])
        return Source(target.parent.parent, target, "named")
    if not target.is_dir():
        raise ConfigError([f"RUN: found {str(target)!r}, which is no folder, allowed: runs/NAME"])
    if not (target / "config.yaml").is_file():
        raise ConfigError([f"RUN: {target} is not a run (no config.yaml in it), allowed: runs/NAME"])
    found = [checkpoint for checkpoint in RunFolder(target).committed() if _has_weights(checkpoint)]
    if not found:
        raise ConfigError([f"RUN: {target} has no complete checkpoint with weights yet"])
    best = _best(target, found)
    return Source(target, best, "the best") if best else Source(target, found[-1], "the newest")


def _has_weights(checkpoint: Path) -> bool:
    return (checkpoint / "hf" / "config.json").is_file()


def _best(run: Path, checkpoints: list[Path]) -> Path | None:
    """The checkpoint with the best greedy held-out success, where the run keeps it."""
    if not (read_run_config(run).get("checkpoint") or {}).get("keep_best"):
        return None
    history = EvaluationHistory()
    history.restore(read_state(checkpoints[-1]).get("evaluations", []))
    best = history.best()
    named = [folder for folder in checkpoints if best and folder.name == f"step_{best[0]:06d}"]
    return named[0] if named else None


def export(source: Source, folder: Path) -> None:
    """Write `folder`. Raises ConfigError where the weights are damaged or `folder` exists."""
    config = read_run_config(source.run)
    weights = weight_files(source.checkpoint / "hf")
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        fresh.chmod(0o755)
        for name in [*COPIED, *weights]:
            if (source.checkpoint / "hf" / name).is_file():
                shutil.copyfile(source.checkpoint / "hf" / name, fresh / name)
        facts = read_facts(source.run, source.checkpoint, source.step, config)
        (fresh / CARD).write_text(model_card(facts), encoding="utf-8")
        _sync(fresh)
        if folder.exists():
            raise ConfigError([f"OUT: {folder} exists by now and is never overwritten; name another folder"])
        os.rename(fresh, folder)
        sync_folder(folder.parent)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def weight_files(folder: Path) -> list[str]:
    """Names of the weight files, with the index where there are several. Raises ConfigError for a file that
    is missing, cut short or not safetensors, or a tensor that is not where the index says."""
    from safetensors import SafetensorError, safe_open

    index = folder / INDEX
    weight_map: dict[str, str] = {}
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError([f"{index} is damaged: {error!r}"]) from error
    names = sorted(set(weight_map.values())) or ["model.safetensors"]
    problems: list[str] = []
    found: dict[str, str] = {}
    for name in names:
        try:
            with safe_open(str(folder / name), framework="np") as file:
                found |= dict.fromkeys(file.keys(), name)
        except FileNotFoundError:
            problems.append(f"{folder / name} is missing")
        except (SafetensorError, OSError) as error:
            problems.append(f"{folder / name} is damaged: {' '.join(str(error).split())}")
    if not problems and weight_map and found != weight_map:
        wrong = sorted(name for name, _ in found.items() ^ weight_map.items())
        problems.append(f"{index} and its files disagree about {wrong[0]} ({len(set(wrong))} tensors in all)")
    if problems:
        raise ConfigError(problems)
    return [*names, INDEX] if weight_map else names


def _sync(folder: Path) -> None:
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    sync_folder(folder)
