"""The metric sinks that a run asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from launch.config import TrainConfig
from megatron_agent.ports import Tracker
from megatron_agent.tracking.composite import CompositeTracker
from megatron_agent.tracking.console import ConsoleTracker
from megatron_agent.tracking.curve import CurveTracker
from megatron_agent.tracking.jsonl import JsonlTracker
from megatron_agent.tracking.trajectories import TrajectoryTracker


def make_tracker(
    config: TrainConfig, run: Path, decode: Callable[[Sequence[int]], str], *, first_step: int
) -> CompositeTracker:
    """JSONL and the curve always; console, trajectories, TensorBoard and wandb as `tracking` says."""
    settings = config.tracking
    metrics = run / "metrics.jsonl"
    sinks: list[Tracker] = [JsonlTracker(metrics)]
    if settings.console:
        sinks.append(ConsoleTracker(config.schedule.steps, first=first_step))
    if settings.trajectories_per_step > 0:
        sinks.append(TrajectoryTracker(run / "trajectories", decode, settings.trajectories_per_step))
    if settings.tensorboard:
        from megatron_agent.tracking.tensorboard import TensorBoardTracker

        sinks.append(TensorBoardTracker(run / "tensorboard"))
    if settings.wandb:
        from megatron_agent.tracking.wandb import WandbTracker

        resolved = asdict(config)
        sinks.append(
            WandbTracker(run / "wandb", project=settings.wandb_project, name=run.name, config=resolved)
        )
    sinks.append(CurveTracker(metrics, run / "curve.png", run.name))
    return CompositeTracker(sinks)
