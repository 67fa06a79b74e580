"""Numeric bars that a run checks on itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_agent.contracts import Floats, PackedBatch
from megatron_agent.errors import NumericsError
from megatron_agent.settings import NumericsSettings


@dataclass(frozen=True, slots=True)
class LogprobGap:
    """|trainer - engine| log-prob over the action tokens of a version-matched batch."""

    mean: float
    p99: float
    max: float

    def check(self, bars: NumericsSettings, version: int) -> None:
        """Raises NumericsError where the trainer and the engines do not hold the same policy."""
        if not (self.max <= bars.max_logprob_gap and self.p99 <= bars.p99_logprob_gap):
            raise NumericsError(
                f"trainer and engine disagree on the policy at version {version}: log-prob gap p99 "
                f"{self.p99:.2e} (bar numerics.p99_logprob_gap {bars.p99_logprob_gap:g}), max {self.max:.2e} "
                f"(bar numerics.max_logprob_gap {bars.max_logprob_gap:g}); the engine serves other weights, "
                "another temperature or another precision"
            )


def logprob_gap(batch: PackedBatch, trainer_logprobs: Sequence[Floats]) -> LogprobGap:
    """Gap over all action tokens with a finite behaviour log-prob; zeros where there are none. A trainer's
    log-prob that is not finite is a gap that no bar allows."""
    gaps = [
        np.abs(trainer.astype(np.float64) - row.behaviour_logprobs)[
            row.action_mask & np.isfinite(row.behaviour_logprobs)
        ]
        for row, trainer in zip(batch.rows, trainer_logprobs, strict=True)
    ]
    flat = np.concatenate(gaps) if gaps else np.zeros(0)
    if not len(flat):
        return LogprobGap(0.0, 0.0, 0.0)
    if not np.isfinite(flat).all():
        return LogprobGap(np.inf, np.inf, np.inf)
    return LogprobGap(float(flat.mean()), float(np.quantile(flat, 0.99)), float(flat.max()))
