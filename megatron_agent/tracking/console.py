"""The live console: one line per step, a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from typing import TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from megatron_agent.contracts import Group

COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("reward", "train/reward", "{:.3f}"),
    ("success", "train/success", "{:.3f}"),
    ("turns", "rollout/turns", "{:.1f}"),
    ("malformed", "rollout/malformed_calls", "{:.0f}"),
    ("stale", "staleness/max", "{:.0f}"),
    ("trainer tok/s", "throughput/trainer_tokens_per_s", "{:.0f}"),
    ("fleet tok/s", "throughput/fleet_tokens_per_s", "{:.0f}"),
    ("sync s", "time/sync_s", "{:.2f}"),
    ("gap", "numerics/logprob_gap_max", "{:.1e}"),
    ("step s", "time/step_s", "{:.1f}"),
)
"""Label, metric, format. A metric that a step does not have is left out of its line."""


class ConsoleTracker:
    """Prints `step 5/20 | reward 0.43 | ...` and, where a step was evaluated, a line of held-out success."""

    def __init__(self, steps: int, *, first: int = 0, file: TextIO | None = None) -> None:
        self.steps = steps
        self._console = Console(file=file or sys.stdout, highlight=False)
        self._progress: Progress | None = None
        if self._console.is_terminal:
            self._progress = Progress(
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=self._console,
                transient=True,
            )
            self._bar = self._progress.add_task("training", total=steps, completed=first)
            self._progress.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for line in (step_line(step, self.steps, metrics), evaluation_line(step, self.steps, metrics)):
            if line:
                # Plain output goes to logs and pipes: a line is not wrapped there.
                self._console.print(line, markup=False, soft_wrap=True)
        if self._progress is not None:
            self._progress.update(self._bar, completed=step)

    def log_trajectories(self, step: int, groups: Iterable[Group]) -> None:
        pass

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()


def step_line(step: int, steps: int, metrics: Mapping[str, float]) -> str:
    """The line of a training step; "" where nothing of it was measured."""
    parts = [f"{label} {form.format(metrics[name])}" for label, name, form in COLUMNS if name in metrics]
    parts += [
        f"{name.removeprefix('train/success/')} {value:.3f}"
        for name, value in metrics.items()
        if name.startswith("train/success/")
    ]
    skipped = metrics.get("train/skipped_optimizer_steps", 0.0)
    if skipped > 0:
        parts.append(f"SKIPPED optimizer steps {skipped:.0f}")
    broken = [name for name, value in metrics.items() if not math.isfinite(value)]
    if broken:
        parts.append(f"NOT FINITE {', '.join(broken[:3])}")
    return f"{_head(step, steps)} | {' | '.join(parts)}" if parts else ""


def evaluation_line(step: int, steps: int, metrics: Mapping[str, float]) -> str:
    """The line of an evaluation: success with its 95 % interval, then success by difficulty."""
    parts = []
    for kind in ("greedy", "sampled"):
        name = f"eval/{kind}/success"
        if name in metrics:
            low, high = metrics.get(f"{name}_low"), metrics.get(f"{name}_high")
            interval = f" [{low:.3f}, {high:.3f}]" if low is not None and high is not None else ""
            parts.append(f"{kind} {metrics[name]:.3f}{interval}{_by_difficulty(kind, metrics)}")
    return f"{_head(step, steps)} | held-out | {' | '.join(parts)}" if parts else ""


def _by_difficulty(kind: str, metrics: Mapping[str, float]) -> str:
    start, end = f"eval/{kind}/difficulty_", "/success"
    found = {
        name[len(start) : -len(end)]: value
        for name, value in metrics.items()
        if name.startswith(start) and name.endswith(end)
    }
    return (
        f" ({' '.join(f'{level}: {value:.2f}' for level, value in sorted(found.items()))})" if found else ""
    )


def _head(step: int, steps: int) -> str:
    return f"step {step:>{len(str(steps))}}/{steps}"
