"""Where the seconds of a step went."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """Times the phases of one step: `with watch("train"): ...`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._started = time.perf_counter()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - started

    def metrics(self, *, trained_tokens: float, sampled_tokens: float) -> dict[str, float]:
        """`time/PHASE_s`, `time/step_s`, `time/idle_s` (outside every phase) and tokens per second."""
        total = time.perf_counter() - self._started
        busy = sum(self.seconds.values())
        return {
            **{f"time/{phase}_s": seconds for phase, seconds in self.seconds.items()},
            "time/step_s": total,
            "time/idle_s": max(0.0, total - busy),
            "throughput/trainer_tokens_per_s": trained_tokens / max(self.seconds.get("train", 0.0), 1e-9),
            "throughput/fleet_tokens_per_s": sampled_tokens / max(self.seconds.get("rollout", 0.0), 1e-9),
        }
