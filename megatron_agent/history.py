"""Held-out success over the steps, and what follows from it: which step is the best, when to stop early."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron_agent.settings import EvalSettings


@dataclass
class EvaluationHistory:
    """Greedy held-out success per evaluated step; part of every checkpoint."""

    entries: list[tuple[int, float]] = field(default_factory=list)

    def add(self, step: int, success: float) -> bool:
        """Record an evaluation; True where it is better than all before."""
        best = self.best()
        self.entries.append((step, success))
        return best is None or success > best[1]

    def best(self) -> tuple[int, float] | None:
        """(step, success) of the best evaluation, the first among equals."""
        return max(self.entries, key=lambda entry: entry[1], default=None)

    def reason_to_stop(self, settings: EvalSettings) -> str:
        """Why training should end now; empty where it should not."""
        if not self.entries:
            return ""
        success = self.entries[-1][1]
        if 0 < settings.stop_at_success <= success:
            return f"held-out success {success:.3f} reached eval.stop_at_success {settings.stop_at_success:g}"
        best = self.best()
        since = sum(1 for entry in self.entries if best and entry[0] > best[0])
        if 0 < settings.patience <= since:
            return f"no better held-out success in {since} evaluations (eval.patience {settings.patience})"
        return ""

    def state(self) -> list[list[Any]]:
        return [list(entry) for entry in self.entries]

    def restore(self, state: list[list[Any]]) -> None:
        self.entries = [(int(step), float(success)) for step, success in state]
