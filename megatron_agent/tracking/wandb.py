"""Weights & Biases, offline unless the user says otherwise."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_agent.contracts import Group


class WandbTracker:
    """Logs to `folder/wandb`. Without WANDB_MODE in the environment nothing leaves the machine
    (`wandb sync` uploads later). A resumed run appends a new wandb run of the same name and group."""

    def __init__(self, folder: Path, *, project: str, name: str, config: Mapping[str, Any]) -> None:
        os.environ.setdefault("WANDB_MODE", "offline")
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=project,
            name=name,
            group=name,
            dir=str(folder),
            config=dict(config),
            # Ours is a console of its own and interrupts are the loop's.
            settings=wandb.Settings(console="off"),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def log_trajectories(self, step: int, groups: Iterable[Group]) -> None:
        pass

    def close(self) -> None:
        self._run.finish()
