"""The folder of a run: what it holds, which checkpoint is the last complete one, when it is finished.

    runs/NAME/config.yaml  metrics.jsonl  cold_start.jsonl  curve.png  trajectories/  model/ (tiny only)
              checkpoints/step_000020/{shards/, hf/, state.json, store.bin, COMMITTED}
              checkpoints/cold_start_000120/ (interrupted there)
              FINISHED

Rules: a checkpoint is written as NAME.draft-UNIQUE, COMMITTED (the list of its files) last, and then gets its
name: what a killed process left writing never reaches a newer folder. A checkpoint without COMMITTED does not
exist; old checkpoints are removed only after a newer one is committed; a damaged one is named, never passed
over; a run with FINISHED is never written to again.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import tempfile
from itertools import count
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from launch.config import TrainConfig
from launch.manifest import COMMITTED, damage, write_marker
from megatron_agent.errors import ConfigError
from megatron_agent.files import sync_folder, write_atomically

CONFIG = "config.yaml"
STATE = "state.json"
STORE = "store.bin"
FINISHED = "FINISHED"
LOCK = ".lock"
_CHECKPOINT = re.compile(r"(cold_start|step)_(\d+)")
FREE_KEYS = (
    "run.resume",
    "run.name",
    "run.dir",
    "tracking.",
    "cluster.",
    "schedule.steps",
    "eval.",
    "checkpoint.",
)
"""Settings that may differ when a run is continued."""


class RunFolder:
    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def finished(self) -> bool:
        return (self.path / FINISHED).exists()

    def committed(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        found = [
            (match[1] == "step", int(match[2]), folder)
            for folder in self.checkpoints.glob("*_*")
            if (match := _CHECKPOINT.fullmatch(folder.name)) and (folder / COMMITTED).exists()
        ]
        return [folder for _, _, folder in sorted(found)]

    def lock(self) -> bool:
        """Claim the folder for this process; False where another one holds it. Freed when we end."""
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = open(self.path / LOCK, "w")  # noqa: SIM115 (held as long as the process)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            return False
        return True

    def changed_settings(self, config: TrainConfig) -> list[str]:
        """Keys in which `config` differs from the one that the run was started with."""
        if not (self.path / CONFIG).exists():
            return []
        before = _flat(read_run_config(self.path))
        now = _flat(OmegaConf.to_container(OmegaConf.structured(config), resolve=True))
        return [
            f"{key}: {before.get(key)!r} -> {now.get(key)!r}"
            for key in sorted(before.keys() | now.keys())
            if before.get(key) != now.get(key) and not key.startswith(FREE_KEYS)
        ]

    def start_checkpoint(self, phase: str, step: int) -> Path | None:
        """An empty folder to write the checkpoint of `step` in `phase` (cold_start | step) into; leftovers of
        broken saves are removed. None where that checkpoint is already complete."""
        name = f"{phase}_{step:06d}"
        if (self.checkpoints / name / COMMITTED).exists():
            return None
        for leftover in [*self.checkpoints.glob("*.draft-*"), self.checkpoints / name]:
            # A writer that outlived its killed run may still add files.
            shutil.rmtree(leftover, ignore_errors=True)
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f"{name}.draft-", dir=self.checkpoints))
        draft.chmod(0o755)
        return draft

    def commit(self, draft: Path, state: dict[str, Any], *, keep: int, best: int | None = None) -> Path:
        """Write the state and the marker into a folder of `start_checkpoint` and give it its name; then
        remove all but the newest `keep` checkpoints and that of step `best`. Returns the named folder."""
        write_atomically(draft / STATE, json.dumps(state).encode())
        write_marker(draft)
        checkpoint = self.checkpoints / draft.name.partition(".")[0]
        os.rename(draft, checkpoint)
        sync_folder(self.checkpoints)
        for old in self.committed()[: -max(1, keep)]:
            if best is None or old.name != f"step_{best:06d}":
                (old / COMMITTED).unlink()
                shutil.rmtree(old)
        return checkpoint

    def finish(self) -> None:
        write_atomically(self.path / FINISHED, b"")

    def latest_hf(self) -> Path | None:
        """HF folder of the newest complete checkpoint. Raises ConfigError where that one is damaged."""
        checkpoints = self.committed()
        if not checkpoints:
            return None
        require_intact(checkpoints[-1], unread="shards")
        return checkpoints[-1] / "hf"

    def clear_metrics(self) -> None:
        """Forget what an attempt without a checkpoint logged."""
        for name in ("metrics.jsonl", "cold_start.jsonl", "curve.png"):
            (self.path / name).unlink(missing_ok=True)
        shutil.rmtree(self.path / "trajectories", ignore_errors=True)


def open_run(config: TrainConfig, suffix: str = "") -> tuple[RunFolder, Path | None]:
    """The run's folder, locked for this process, and the checkpoint that it continues from.

    Where no name was chosen (the default is the recipe's), the first of NAME, NAME-2, ... is taken that is
    free, or unfinished with the same settings (`suffix` is added to NAME). Raises ConfigError
    where a chosen name cannot be used.
    """
    run = config.run
    if run.name != config.recipe:
        folder = RunFolder(Path(run.dir) / run.name)
        problems = _refusals(folder, config)
        if problems:
            raise ConfigError(problems)
    else:
        name = run.name + suffix
        names = (name if n == 1 else f"{name}-{n}" for n in count(1))
        folder = next(f for f in (RunFolder(Path(run.dir) / n) for n in names) if not _refusals(f, config))
    folder.checkpoints.mkdir(parents=True, exist_ok=True)
    checkpoint = _start_point(folder, run.resume)
    if checkpoint is None:
        folder.clear_metrics()
    else:
        require_intact(checkpoint, unread="hf", advice=_way_out(folder, checkpoint))
    return folder, checkpoint


def require_intact(checkpoint: Path, *, unread: str, advice: str = "") -> None:
    """Raises ConfigError with the files of a committed checkpoint that are not as they were saved; those
    below `unread` (hf | shards) are only measured."""
    if found := damage(checkpoint, unread=unread):
        raise ConfigError([f"{checkpoint} is damaged: {found}{f'; {advice}' if advice else ''}"])


def _refusals(folder: RunFolder, config: TrainConfig) -> list[str]:
    """Why `config` cannot be run in `folder`."""
    resume = config.run.resume
    if folder.finished:
        return [
            f"run.name: {folder.path} is a finished run and is never overwritten; choose another run.name"
        ]
    checkpoints = folder.committed()
    if checkpoints and resume == "never":
        return [
            f"run.resume=never: {folder.path} already holds {checkpoints[-1].name}; choose another run.name, "
            "or run.resume=auto to continue it"
        ]
    if checkpoints and (changes := folder.changed_settings(config)):
        return [
            f"run.name: {folder.path} was started with other settings ({'; '.join(changes)}); "
            "choose another run.name, or continue it with its own settings"
        ]
    if not folder.lock():
        return [f"run.name: {folder.path} is in use by another process"]
    return []


def _start_point(folder: RunFolder, resume: str) -> Path | None:
    if resume not in ("auto", "never"):
        return Path(resume)
    checkpoints = folder.committed()
    return checkpoints[-1] if checkpoints else None


def _way_out(folder: RunFolder, damaged: Path) -> str:
    """What to do about a damaged checkpoint of the run."""
    if damaged.parent.resolve() != folder.checkpoints.resolve():
        return "choose another one for run.resume"
    older = [checkpoint.name for checkpoint in folder.committed() if checkpoint.name != damaged.name]
    return f"move it away to continue from {older[-1] if older else 'the beginning'}"


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix: value}
    return {
        k: v for key, part in value.items() for k, v in _flat(part, f"{prefix}.{key}".lstrip(".")).items()
    }


def read_state(checkpoint: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((checkpoint / STATE).read_text())
    return state


def read_run_config(run: Path) -> dict[str, Any]:
    """The saved configuration of a run, not checked: it may be that of another version. Raises ConfigError
    where it cannot be read."""
    path = run / CONFIG
    try:
        content = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except Exception as error:
        raise ConfigError([f"{path} cannot be read: {' '.join(str(error).split())}"]) from error
    if not isinstance(content, dict):
        raise ConfigError([f"{path} cannot be read: it holds no settings"])
    return {str(key): value for key, value in content.items()}
