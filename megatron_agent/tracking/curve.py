"""curve.png: how success rose, drawn from metrics.jsonl."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_agent.contracts import Group
from megatron_agent.files import write_atomically
from megatron_agent.tracking.jsonl import read_metrics

Series = tuple[list[float], list[float]]
COLOURS = {"greedy": "#1b6ca8", "sampled": "#d1701e"}
DIFFICULTY = re.compile(r"eval/greedy/difficulty_(.+)/success")


class CurveTracker:
    """Redraws the curve after every evaluation and at the end. It reads what the JSONL tracker wrote, so it
    comes after it, and a resumed run shows its whole history."""

    def __init__(self, metrics: Path, picture: Path, title: str = "") -> None:
        self.metrics, self.picture, self.title = metrics, picture, title
        self._fresh = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._fresh = True
        if any(name.startswith("eval/") for name in metrics):
            self._draw()

    def log_trajectories(self, step: int, groups: Iterable[Group]) -> None:
        pass

    def close(self) -> None:
        if self._fresh:
            self._draw()

    def _draw(self) -> None:
        draw_curve(self.metrics, self.picture, self.title)
        self._fresh = False


def draw_curve(metrics: Path, picture: Path, title: str = "") -> None:
    """Draw held-out success (greedy and sampled, 95 % intervals), greedy success by difficulty, and the
    training reward over the steps."""
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    from matplotlib.figure import Figure

    rows = read_metrics(metrics)
    figure = Figure(figsize=(15, 4.4), layout="constrained")
    heldout, levels, training = figure.subplots(1, 3)
    _draw_heldout(heldout, rows)
    _draw_difficulties(levels, rows)
    _draw_training(training, rows)
    if title:
        figure.suptitle(title)
    buffer = io.BytesIO()
    # Without pyplot a figure has the Agg canvas: no display is needed and no state is shared.
    figure.savefig(buffer, format="png")
    write_atomically(picture, buffer.getvalue())


def series(rows: Sequence[Mapping[str, float]], name: str) -> Series:
    """Steps and values of one metric, where it was logged."""
    points = [(row["step"], row[name]) for row in rows if name in row]
    return [step for step, _ in points], [value for _, value in points]


def difficulties(rows: Sequence[Mapping[str, float]]) -> list[str]:
    names = {match[1] for row in rows for name in row if (match := DIFFICULTY.fullmatch(name))}
    return sorted(names, key=lambda name: (len(name), name))


def _draw_heldout(axes: Any, rows: Sequence[Mapping[str, float]]) -> None:
    for kind, colour in COLOURS.items():
        name = f"eval/{kind}/success"
        steps, values = series(rows, name)
        if not steps:
            continue
        axes.plot(steps, values, marker="o", color=colour, label=kind)
        low_steps, low = series(rows, f"{name}_low")
        high_steps, high = series(rows, f"{name}_high")
        if low_steps == high_steps:
            axes.fill_between(low_steps, low, high, color=colour, alpha=0.18, linewidth=0)
    _finish(axes, "held-out success (95 % interval)")


def _draw_difficulties(axes: Any, rows: Sequence[Mapping[str, float]]) -> None:
    for level in difficulties(rows):
        axes.plot(
            *series(rows, f"eval/greedy/difficulty_{level}/success"), marker="o", label=f"difficulty {level}"
        )
    _finish(axes, "held-out success by difficulty, greedy")


def _draw_training(axes: Any, rows: Sequence[Mapping[str, float]]) -> None:
    for name, label, style in (("train/success", "success", "-"), ("train/reward", "reward", "--")):
        steps, values = series(rows, name)
        if steps:
            axes.plot(steps, values, style, label=label)
    _finish(axes, "attempts in training (sampled)", bounded=False)


def _finish(axes: Any, title: str, *, bounded: bool = True) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("step")
    if bounded:
        axes.set_ylim(-0.02, 1.02)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.25)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)
    else:
        axes.text(0.5, 0.5, "nothing logged yet", ha="center", va="center", transform=axes.transAxes)
