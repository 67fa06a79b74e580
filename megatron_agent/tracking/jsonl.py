"""metrics.jsonl: one JSON object per logged step, always written."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_agent.contracts import Group

WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class JsonlTracker:
    """Appends `{"step": ..., "wall_s": seconds since the epoch, NAME: value, ...}` and flushes every line.

    JSON has no NaN or infinity: they are written as the strings NaN, Infinity and -Infinity. A line that a
    crash cut short is left alone and the next one starts on a line of its own; a step that is logged again
    (after a resume) is a further line. `read_metrics` undoes all three.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        torn = _is_torn(path)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (closed in `close`)
        if torn:
            self._file.write("\n")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        row: dict[str, Any] = {"step": step, "wall_s": round(time.time(), 3)}
        row |= {name: _encode(value) for name, value in metrics.items()}
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()

    def log_trajectories(self, step: int, groups: Iterable[Group]) -> None:
        pass

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, float]]:
    """One dictionary per step in rising order, `step` and `wall_s` included. Lines of one step are merged,
    the later one wins; unreadable lines are left out."""
    steps: dict[int, dict[str, float]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
            step = int(row["step"])
        except (ValueError, TypeError, KeyError):
            continue
        values = {name: WORDS.get(value, value) for name, value in row.items()}
        numbers = {name: float(v) for name, v in values.items() if isinstance(v, int | float)}
        steps[step] = steps.get(step, {}) | numbers
    return [steps[step] for step in sorted(steps)]


def _encode(value: float) -> float | int | str:
    if isinstance(value, int):
        return value
    number = float(value)
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


def _is_torn(path: Path) -> bool:
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) != b"\n"
